// What attention_kernel.h needs, included before a level's instructions are switched on: nothing
// that other files share may be compiled with them.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "../address.h"
#include "attention_params.h"
#include "isa.h"
#include "scratch.h"

#ifdef EAGLE2_X86_LEVELS
#include <immintrin.h>
#endif
