"""How the stacks of other threads are looked at."""

import gc
import os
import threading
import traceback
import warnings

from launchpad_lite._stacks import describe_threads, frames_of_threads


def test_no_garbage_is_collected_while_frames_of_other_threads_are_looked_at() -> None:
    phases: list[str] = []
    done = threading.Event()

    def note(phase: str, _: object) -> None:
        phases.append(phase)

    thread = threading.Thread(target=done.wait)
    thread.start()
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    try:
        with frames_of_threads() as frames:
            gc.set_threshold(1)
            phases.clear()
            stacks = [traceback.extract_stack(frame) for frame in frames.values()]
            assert len(stacks) >= 2
            assert not phases
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
        done.set()
        thread.join()


def test_a_child_that_is_forked_meanwhile_collects_garbage_and_looks_at_frames() -> None:
    codes: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from 3.12 on, of threads
            child = os.fork()
        if not child:
            try:
                describe_threads()
            finally:
                os._exit(0 if gc.isenabled() else 3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with frames_of_threads():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [0]
