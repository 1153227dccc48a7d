"""Drops the code that Dynamo has compiled, while other threads may run it.

`torch._dynamo.reset` frees what belongs to compiled code even while another thread is inside of it, and the process
then ends with a segmentation fault (seen in torch 2.13). So the code is only marked as invalid here, as Dynamo does
when a guarded object is garbage-collected. At that moment, too, other threads may be inside the code.
"""

from __future__ import annotations

import weakref

import torch._dynamo
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.types import FrameAction, FrameExecStrategy


def drop_compiled_code() -> None:
    """Let every compiled function be compiled again at its next call. Waits for a compilation in another thread."""
    with convert_frame.compile_lock:
        torch._dynamo.reset_code_state()
        for reference in list(convert_frame.input_codes.seen):
            code = reference()
            if code is None:
                continue
            for entry in _debug_get_cache_entry_list(code):
                if entry.guard_manager.extra_state is not None:
                    guards = DeletedGuardManagerWrapper("mglu_ops.enable_fusion was called")
                    # As if guarded by a local variable that none has: Dynamo does not count such an entry against its
                    # limit of compilations per function.
                    guards.id_matched_objs = {"": weakref.ref(drop_compiled_code)}
                    entry.guard_manager.extra_state.invalidate(entry, guards)
            # Dynamo no longer compiles a function that was compiled too often; let it begin again.
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))
