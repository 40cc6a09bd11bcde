// What no right kernel does: addresses of nobody, conflicts in LDS, registers before their load.
#pragma once

#include "machine.h"

namespace cdna {

// A dword of memory. A fault if it is in none of the launch's ranges, or not aligned.
u8* memory(const Wave& w, u64 address);

// A dword of LDS, or null if it is out of range, which is counted.
u32* lds_dword(const Wave& w, u64 address);

// Notes an access to a dword of LDS, and whether it conflicts with another wave's.
// `same_value`: it writes what is there already.
void note_access(Wave& w, const Pending& p, u64 address, bool is_write, bool same_value);

// A fault if the instruction uses a register that a load is on its way to.
void check_registers(const Wave& w, const Instruction& i);

}  // namespace cdna
