"""What can go wrong, by exit code. Messages are one sentence that names the key or file as the user wrote it.

UndriftError
  BadInput      2    the configuration, a file or a stack is wrong: nothing was run, nothing is lost
  RunFailed     3    the run could not go on: user code, memory, disk; what was saved stays whole
  Interrupted 130    a signal: the round in flight was dropped, the state is saved
"""


class UndriftError(Exception):
    exit_code = 3


class BadInput(UndriftError):
    exit_code = 2


class RunFailed(UndriftError):
    exit_code = 3


class Interrupted(UndriftError):
    exit_code = 130
