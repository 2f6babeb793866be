#include "tables/primes.h"

#include <algorithm>
#include <array>

#include "tables/numpy_random.h"

namespace ehc::tables {
namespace {

constexpr int64_t kLargestWindow = 1 << 18;
constexpr int64_t kRoot = 46341;  // smallest number whose square exceeds 2^31 - 1

uint64_t multiply(uint64_t a, uint64_t b, uint64_t modulus) {
  return static_cast<uint64_t>(uint128{a} * b % modulus);
}

uint64_t power(uint64_t base, uint64_t exponent, uint64_t modulus) {
  uint64_t result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, base, modulus);
    base = multiply(base, base, modulus);
  }
  return result;
}

const std::vector<int64_t>& sieving_primes() {
  static const std::vector<int64_t> primes = [] {
    std::vector<bool> composite(kRoot);
    std::vector<int64_t> found;
    for (int64_t number = 2; number < kRoot; ++number) {
      if (composite[static_cast<size_t>(number)]) continue;
      found.push_back(number);
      for (int64_t multiple = number * number; multiple < kRoot; multiple += number) {
        composite[static_cast<size_t>(multiple)] = true;
      }
    }
    return found;
  }();
  return primes;
}

}  // namespace

bool is_prime(uint64_t number) {
  constexpr std::array<uint64_t, 12> kBases = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
  if (number < 2) return false;
  for (const uint64_t base : kBases) {
    if (number % base == 0) return number == base;
  }
  uint64_t odd = number - 1;
  int twos = 0;
  for (; odd % 2 == 0; odd /= 2) ++twos;
  return std::all_of(kBases.begin(), kBases.end(), [&](uint64_t base) {
    uint64_t value = power(base, odd, number);
    if (value == 1) return true;
    for (int i = 0; i < twos; ++i, value = multiply(value, value, number)) {
      if (value == number - 1) return true;
    }
    return false;
  });
}

PrimeCursor::PrimeCursor(int64_t first) : window_begin_(std::max<int64_t>(first, 2)) {}

int64_t PrimeCursor::next() {
  while (window_begin_ <= kLargestTablePrime) {
    if (composite_.empty()) sieve_window();
    while (position_ < composite_.size()) {
      const size_t candidate = position_++;
      if (composite_[candidate] == 0) return window_begin_ + static_cast<int64_t>(candidate);
    }
    window_begin_ += static_cast<int64_t>(composite_.size());
    composite_.clear();
  }
  return 0;
}

void PrimeCursor::sieve_window() {
  const int64_t size = std::min(window_size_, kLargestTablePrime - window_begin_ + 1);
  window_size_ = std::min(window_size_ * 2, kLargestWindow);
  composite_.assign(static_cast<size_t>(size), 0);
  position_ = 0;
  for (const int64_t prime : sieving_primes()) {
    if (prime * prime >= window_begin_ + size) break;
    const int64_t first_multiple = (window_begin_ + prime - 1) / prime * prime;
    for (int64_t multiple = std::max(prime * prime, first_multiple) - window_begin_;
         multiple < size; multiple += prime) {
      composite_[static_cast<size_t>(multiple)] = 1;
    }
  }
}

}  // namespace ehc::tables
