"""This file tells an error of a step from the end of the device.

After an illegal access, a failed device-side assertion or an uncorrectable memory error, everything
that this process asks of the device fails in the same way, for ever: only another process can use
it again. It does not know what the process does about that.
"""

from __future__ import annotations

import torch


class DeviceLost(RuntimeError):
    """Nothing can be computed on the device in this process any more."""


def check_device(device: torch.device, error: BaseException) -> None:
    """Asks the device, since one error does not look like another: an exception that came out of
    its code says little. Raises DeviceLost from `error` if it answers no more; may wait for it."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as failure:
        first = (str(failure).strip() or type(failure).__name__).split("\n")[0]
        raise DeviceLost(f"{device} is lost to this process: {first}") from error
