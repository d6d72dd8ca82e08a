"""The operators in C for x86-64 CPUs with AVX512 VNNI (faster still with BF16), compiled at first
use.

`csrc/` is the C, `build` compiles and caches it, `native` loads it and checks it once, `ops` is the
flavour of `kernels.ops.base.Ops`, `stack` runs a whole decoder in one call. Where the C can't be
had, `OpsUnavailable` says why and the caller takes the reference.
"""

from __future__ import annotations

from kernels.ops.cpu import ops as ops  # registers the flavour "cpu"
