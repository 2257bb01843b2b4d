#include "huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fulmen {

void prefer_huge_pages(const fulmen_tensor &x, int64_t batch, int64_t tokens, int64_t heads, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = 1 << 21;
    if (!x.data || batch * tokens == 0) return;
    const int64_t last = (batch - 1) * x.stride_batch + (tokens - 1) * x.stride_token + (heads - 1) * x.stride_head;
    const uintptr_t begin = (uintptr_t)x.data;
    const uintptr_t end = begin + (uintptr_t)((last + size) * (x.dtype == FULMEN_FLOAT32 ? 4 : 2));
    const uintptr_t first_page = (begin + page - 1) / page * page, last_page = end / page * page;
    if (last_page >= first_page + 2 * page) madvise((void *)first_page, last_page - first_page, MADV_HUGEPAGE);
#else
    (void)x, (void)batch, (void)tokens, (void)heads, (void)size;
#endif
}

}  // namespace fulmen
