"""Collectives as schedules: an algorithm is data, one executor runs it, one checker proves it.

``schedule`` the steps; ``ring tree butterfly direct`` the algorithms; ``check`` the proof;
``simulate`` the cost; ``executor`` the sender; ``native`` the MPI library's own;
``selection`` the measured choice; ``allreduce blocks rooted`` the public functions.
"""
