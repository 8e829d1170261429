"""How the stacks of other threads are looked at."""

import gc
import threading
import traceback

from launchpad_lite._stacks import frames_of_threads


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
