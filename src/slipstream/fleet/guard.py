"""Runs a program and ends it, with all that it has started, when standard input closes: `python guard.py COMMAND …`.

Nothing of ours is imported: one of these stands beside every rank of somebody's program, which knows nothing of us.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(
            number, lambda *_: None
        )  # the program, in the same group, has it too; not SIG_IGN: it would inherit that
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    code = program.wait()
    if code < 0:  # as it was ended, so that who started us sees it
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _die_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
