// How fast memory can be read: the floor under every pass, which has to read all weights.
#pragma once

#include <cstddef>

namespace paceline {

// Gigabytes (1e9 bytes) a second that num_threads threads read from a buffer of num_bytes, each its own part of it.
// Buffers that fit into a cache measure that cache, as weights of their size would. Throws std::bad_alloc.
double read_bandwidth(int num_threads, std::size_t num_bytes);

}  // namespace paceline
