// Linux has memory for tile registers for processes that ask for it.
#pragma once

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fulmen {

inline bool request_tiles() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace fulmen
