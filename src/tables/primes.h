// Prime numbers: a test for any 64-bit number and a sieve that walks upwards below 2^31.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ehc::tables {

inline constexpr int64_t kLargestTablePrime = 2147483647;  // 2^31 - 1 is prime
inline constexpr int64_t kTablePrimeCount = 105097565;     // primes up to 2^31 - 1

// Exact (Miller-Rabin with bases that are proven sufficient below 2^64).
[[nodiscard]] bool is_prime(uint64_t number);

// The primes from `first` up to 2^31 - 1 in ascending order, sieved window by window.
class PrimeCursor {
 public:
  explicit PrimeCursor(int64_t first);
  // 0 when there is none left.
  int64_t next();

 private:
  void sieve_window();

  int64_t window_begin_;
  int64_t window_size_ = 1 << 14;  // grows: a few primes are cheap to get, and so are many
  size_t position_ = 0;
  std::vector<uint8_t> composite_;
};

}  // namespace ehc::tables
