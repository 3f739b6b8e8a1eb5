// What linear_kernel.h needs, included before a level's instructions are switched on: nothing that
// other files share may be compiled with them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "isa.h"
#include "linear.h"
#include "scratch.h"

#ifdef EAGLE2_X86_LEVELS
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
