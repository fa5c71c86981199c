"""Arguments that no command knows: the error names them alone, and what was probably meant."""

import pytest

from mpidist.cli.main import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --sett a=1 job.toml", "--sett; did you mean '--set'? see mpidist train --help"),
        ("train a.toml b.toml", "b.toml; see mpidist train --help"),
        ("train a.toml --qqqqqq=1", "--qqqqqq; see mpidist train --help"),
        ("launch -n 2 --elastix -- true", "did you mean '--elastic'? see mpidist launch --help"),
    ],
)
def test_an_unknown_option(words, said, capfd):
    """Words that a wrong option has displaced are not named."""
    assert main(words.split()) == 2
    line = capfd.readouterr().err
    assert line.startswith("mpidist: error: unrecognized arguments: ")
    assert line.endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launch -n 0 -- true", "-n 0; expected at least one rank"),
        ("launch -n 1 --max-restarts -1 -- true", "--max-restarts -1; expected a whole number"),
        ("launch -n 1 --max-preemptions -2 -- true", "--max-preemptions -2; expected a whole"),
    ],
)
def test_only_the_wrong_option_is_named(words, said, capfd):
    """Others, with their defaults, are not the user's mistake."""
    assert main(words.split()) == 2
    assert capfd.readouterr().err.startswith(f"mpidist: error: mpidist launch: {said}")


def test_the_folder_above_a_store(tmp_path, capfd):
    """`mpidist train` saves to OUT/checkpoints; who gives OUT is told so."""
    (tmp_path / "checkpoints" / "step-000000000001").mkdir(parents=True)
    assert main(["checkpoint", "list", str(tmp_path)]) == 2
    assert f"did you mean {tmp_path / 'checkpoints'}?" in capfd.readouterr().err
