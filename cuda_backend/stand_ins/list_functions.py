"""Write NO_DEVICE(name) for each function of the CUDA driver that no_driver.c does not define.

usage: list_functions.py CUDA_H NO_DRIVER_C OUTPUT
"""

import re
import sys

cuda_h, no_driver_c, output = sys.argv[1:]
declared = set(
    re.findall(r"CUresult\s+CUDAAPI\s+(cu[A-Z]\w*)\s*\(", open(cuda_h, encoding="utf-8").read())
)
# The header renames some functions with macros, and the real library exports every suffixed form.
exported = {
    name + suffix for name in declared for suffix in ("", "_v2", "_v3", "_ptsz", "_v2_ptsz")
}
defined = set(re.findall(r"\bcu[A-Z]\w*", open(no_driver_c, encoding="utf-8").read()))
with open(output, "w") as f:
    f.writelines(f"NO_DEVICE({name})\n" for name in sorted(exported - defined))
