"""Write TFRecord files and protocol buffers by their specifications, without code of mpidist.

CRC-32C: RFC 3720, B.4, bit by bit. TFRecord: tensorflow.org/tutorials/load_data/tfrecord. Messages:
protobuf.dev/programming-guides/encoding and tensorflow/core/example/{example,feature}.proto.
"""

import struct

TABLE = []
for value in range(256):
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    TABLE.append(value)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(records):
    """The bytes of a TFRecord file."""
    file = b""
    for data in records:
        head = struct.pack("<Q", len(data))
        file += head + masked(head) + data + masked(data)
    return file


def varint(value):
    digits = []
    while value > 127:
        digits.append(value % 128 + 128)
        value //= 128
    return bytes([*digits, value])


def message(*fields):
    """A message of (number, bytes) fields, each with its length."""
    return b"".join(varint(8 * number + 2) + varint(len(text)) + text for number, text in fields)


def bytes_feature(*values):
    return message((1, message(*((1, value) for value in values))))


def integers_feature(values):
    """Packed, as proto3 has it."""
    return message((3, message((1, b"".join(varint(v % 2**64) for v in values)))))


def entry(name, value):
    return 1, message((1, name.encode()), (2, value))


def sequence_example(context, lists):
    """context: name -> a Feature; lists: name -> Features."""
    feature_lists = {name: message(*((1, f) for f in some)) for name, some in lists.items()}
    return message(
        (1, message(*(entry(*item) for item in context.items()))),
        (2, message(*(entry(*item) for item in feature_lists.items()))),
    )
