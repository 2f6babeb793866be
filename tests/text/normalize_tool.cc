// Reads strings on stdin, each as a little-endian uint32 length and that many bytes of UTF-8, and
// writes what `normalize` makes of them to stdout in the same form. For tests/python.
#include <cstdint>
#include <cstring>
#include <exception>
#include <iostream>
#include <iterator>
#include <string>

#include "ehc/text.h"

int main() try {
  const std::string input(std::istreambuf_iterator<char>(std::cin), {});
  std::string output;
  for (size_t at = 0; at < input.size();) {
    uint32_t length = 0;
    if (input.size() - at < sizeof(length)) throw std::runtime_error("cut off in a length");
    std::memcpy(&length, input.data() + at, sizeof(length));
    at += sizeof(length);
    if (input.size() - at < length) throw std::runtime_error("cut off in a string");
    const std::string normalized = ehc::text::normalize(std::string_view(input).substr(at, length));
    at += length;
    length = static_cast<uint32_t>(normalized.size());
    output.append(reinterpret_cast<const char*>(&length), sizeof(length));
    output += normalized;
  }
  std::cout << output << std::flush;
  return std::cout ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "normalize_tool: " << error.what() << '\n';
  return 1;
}
