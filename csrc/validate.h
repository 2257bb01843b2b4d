// Whether a call's struct makes sense; a kernel may rely on all of it.
#pragma once

#include "fulmen.h"

namespace fulmen {

// FULMEN_OK or what is wrong. Who calls has checked that the struct has the size of this version.
#define FULMEN_INVALID(name) int64_t invalid(const fulmen_##name##_call &call);
FULMEN_CALLS(FULMEN_INVALID)
#undef FULMEN_INVALID

}  // namespace fulmen
