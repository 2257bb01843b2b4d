// The library as a whole: each of its builds that this machine can run computes small calls of every operator rightly.
#include "check.h"
#include "fulmen.h"

int main() {
    CHECK(fulmen_version() == FULMEN_VERSION, "version %ld", (long)fulmen_version());
    CHECK(fulmen_isa_supported(fulmen_isa_current()), "the build in use cannot run here");
    int64_t run = 0;
    for (int64_t i = 0; i < fulmen_isa_count(); ++i) {
        if (!fulmen_isa_supported(i)) continue;
        ++run;
        CHECK(fulmen_isa_select(i) && fulmen_isa_current() == i, "%s cannot be selected", fulmen_isa_name(i));
        CHECK(fulmen_isa_self_check(i), "%s fails its self-check", fulmen_isa_name(i));
    }
    CHECK(run > 0, "no build runs here");
    CHECK(!fulmen_isa_select(fulmen_isa_count()) && !*fulmen_isa_name(-1), "a build that there is not");
    return outcome();
}
