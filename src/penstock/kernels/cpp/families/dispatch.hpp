// Which families this build has and this processor can run.
#pragma once

#include <vector>

#include "families/family.hpp"

namespace penstock {

// Best first, but a family never run on its processor is never the first; never empty.
const std::vector<const Family*>& usable_families();

// Null when this processor cannot run the family or it was not built.
const Family* find_family(const char* name);

}  // namespace penstock
