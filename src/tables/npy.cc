#include "tables/npy.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>
#include <vector>

#include "core/tensor_bytes.h"
#include "core/text.h"
#include "ehc/error.h"

namespace ehc::tables {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kHeaderStart = 12;  // longest of the fixed parts: magic, version, length
constexpr uint64_t kLongestHeader = 1 << 16;
constexpr size_t kHeaderAlignment = 64;

constexpr std::pair<std::string_view, DType> kDescriptions[] = {
    {"<f4", DType::f32}, {"<f2", DType::f16}, {"<i8", DType::i64},
    {"<i4", DType::i32}, {"|u1", DType::u8},  {"|b1", DType::boolean}};

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw_io(path, "npy: " + what);
}

struct Description {
  DType dtype = DType::none;
  std::vector<int64_t> shape;
  uint64_t bytes = 0;
};

// The header is a Python dict literal with exactly three keys.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  Description parse() {
    expect('{');
    while (!accept('}')) {
      const std::string_view key = parse_string();
      expect(':');
      if (key == "descr" && description_.dtype == DType::none) {
        parse_dtype();
      } else if (key == "fortran_order" && !has_order_) {
        parse_order();
      } else if (key == "shape" && !has_shape_) {
        parse_shape();
      } else {
        fail(path_, "unknown or repeated header key " + in_quotes(key));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (!rest_.empty()) malformed();
    if (description_.dtype == DType::none || !has_order_ || !has_shape_) {
      fail(path_, "expected the header keys descr, fortran_order and shape");
    }
    count_bytes();
    return description_;
  }

 private:
  [[noreturn]] void malformed() const {
    fail(path_, "malformed header at " + in_quotes(rest_.substr(0, 16)));
  }

  void skip_space() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\n')) rest_.remove_prefix(1);
  }

  bool accept(char wanted) {
    skip_space();
    if (rest_.empty() || rest_[0] != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char wanted) {
    if (!accept(wanted)) malformed();
  }

  std::string_view parse_string() {
    skip_space();
    if (rest_.empty() || (rest_[0] != '\'' && rest_[0] != '"')) malformed();
    const size_t end = rest_.find(rest_[0], 1);
    if (end == std::string_view::npos) malformed();
    const std::string_view text = rest_.substr(1, end - 1);
    rest_.remove_prefix(end + 1);
    return text;
  }

  void parse_dtype() {
    skip_space();
    if (!rest_.empty() && rest_[0] == '[') fail(path_, "structured dtypes are not supported");
    const std::string_view text = parse_string();
    for (const auto& [name, dtype] : kDescriptions) {
      if (text == name) description_.dtype = dtype;
    }
    if (description_.dtype == DType::none) {
      fail(path_, "expected dtype <f4, <f2, <i8, <i4, |u1 or |b1, got " + in_quotes(text));
    }
  }

  void parse_order() {
    skip_space();
    if (rest_.substr(0, 4) == "True") fail(path_, "expected C order, got Fortran order");
    if (rest_.substr(0, 5) != "False") malformed();
    rest_.remove_prefix(5);
    has_order_ = true;
  }

  void parse_shape() {
    has_shape_ = true;
    expect('(');
    while (!accept(')')) {
      if (description_.shape.size() == kMaxRank) {
        fail(path_, "expected at most " + std::to_string(kMaxRank) + " dimensions");
      }
      description_.shape.push_back(parse_dimension());
      if (!accept(',')) {
        // "(3)" is a number in Python, not a tuple.
        if (description_.shape.size() == 1) malformed();
        expect(')');
        break;
      }
    }
  }

  int64_t parse_dimension() {
    skip_space();
    int64_t value = 0;
    size_t digits = 0;
    for (; digits < rest_.size() && std::isdigit(static_cast<unsigned char>(rest_[digits]));
         ++digits) {
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_add_overflow(value, rest_[digits] - '0', &value)) {
        fail(path_, "size overflows 64 bits");
      }
    }
    if (digits == 0) malformed();
    rest_.remove_prefix(digits);
    return value;
  }

  // As in safetensors: the strides of an empty array must fit too.
  void count_bytes() {
    auto bound = static_cast<int64_t>(size_of(description_.dtype));
    bool empty = false;
    for (const int64_t dimension : description_.shape) {
      empty |= dimension == 0;
      if (__builtin_mul_overflow(bound, std::max<int64_t>(dimension, 1), &bound)) {
        fail(path_, "size overflows 64 bits");
      }
    }
    description_.bytes = empty ? 0 : static_cast<uint64_t>(bound);
  }

  std::string_view rest_;
  const std::string& path_;
  Description description_;
  bool has_order_ = false;
  bool has_shape_ = false;
};

// read_bytes(offset, target, bytes) fills the target; the range lies within `size`.
template <class ReadBytes>
NpyArray read_array(uint64_t size, const std::string& path, const ReadBytes& read_bytes) {
  unsigned char start[kHeaderStart] = {};
  read_bytes(0, start, std::min<uint64_t>(size, kHeaderStart));
  if (size < kHeaderStart || std::memcmp(start, kMagic.data(), kMagic.size()) != 0) {
    fail(path, "not an npy file");
  }
  const int version = start[6];
  if (version < 1 || version > 3 || start[7] != 0) {
    fail(path, "expected version 1.0, 2.0 or 3.0, got " + std::to_string(version) + "." +
                   std::to_string(start[7]));
  }
  const size_t text_start = version == 1 ? 10 : 12;
  uint64_t length = 0;
  for (size_t i = 8; i < text_start; ++i) length |= uint64_t{start[i]} << (8 * (i - 8));
  if (length > size - text_start || length > kLongestHeader) {
    fail(path, "the header is said to be " + std::to_string(length) + " bytes long, the file has " +
                   std::to_string(size));
  }
  std::string text(length, '\0');
  read_bytes(text_start, text.data(), length);
  const Description description = HeaderParser(text, path).parse();

  const uint64_t data_start = text_start + length;
  if (size - data_start != description.bytes) {
    fail(path, "expected " + std::to_string(description.bytes) + " bytes of data, got " +
                   std::to_string(size - data_start));
  }
  NpyArray array{AlignedBuffer(description.bytes), {}};
  read_bytes(data_start, array.memory.data(), description.bytes);
  array.tensor = Tensor(array.memory.data(), description.dtype, description.shape.data(),
                        static_cast<int>(description.shape.size()));
  check_booleans(path, "npy", array.tensor);
  return array;
}

std::string format_header(const Tensor& tensor, std::string_view description) {
  std::string text =
      "{'descr': '" + std::string(description) + "', 'fortran_order': False, 'shape': (";
  for (int axis = 0; axis < tensor.rank; ++axis) {
    text += std::to_string(tensor.shape[axis]) + (tensor.rank == 1 ? "," : "");
    if (axis + 1 < tensor.rank) text += ", ";
  }
  text += "), }";
  constexpr size_t kFixed = 10;
  const size_t total =
      (kFixed + text.size() + 1 + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment;
  text.resize(total - kFixed - 1, ' ');
  text += '\n';
  std::string start(kMagic);
  start += {'\1', '\0', static_cast<char>(text.size() & 255), static_cast<char>(text.size() >> 8)};
  return start + text;
}

}  // namespace

NpyArray read_npy(const std::string& path) {
  const InputFile file(path);
  return read_array(file.size(), path, [&](uint64_t offset, void* target, uint64_t bytes) {
    file.read(offset, target, bytes);
  });
}

NpyArray parse_npy(std::string_view bytes, const std::string& path) {
  return read_array(bytes.size(), path, [&](uint64_t offset, void* target, uint64_t count) {
    if (count > 0) std::memcpy(target, bytes.data() + offset, count);
  });
}

void write_npy(const std::string& path, const Tensor& tensor) {
  const auto* found =
      std::find_if(std::begin(kDescriptions), std::end(kDescriptions),
                   [&](const auto& description) { return description.second == tensor.dtype; });
  if (found == std::end(kDescriptions)) {
    throw Error(ErrorKind::contract, "npy: expected F32, F16, I64, I32, U8 or BOOL, got " +
                                         std::string(name_of(tensor.dtype)));
  }
  const std::string_view bytes = writable_bytes("npy", tensor);
  const std::string header = format_header(tensor, found->first);
  const std::string_view parts[] = {header, bytes};
  write_file(path, parts);
}

}  // namespace ehc::tables
