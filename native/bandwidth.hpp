// How fast memory can be read: the floor under every pass, which has to read all weights.
#pragma once

#include <cstddef>

namespace paceline {

// Gigabytes (1e9 bytes) a second that num_threads threads together read from a buffer of about num_bytes, 512 KiB at
// least. A buffer that fits into a cache measures that cache, as weights of its size would. Throws std::bad_alloc.
double read_bandwidth(int num_threads, std::size_t num_bytes);

}  // namespace paceline
