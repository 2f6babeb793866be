#include "tables/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "core/text.h"

namespace ehc::tables {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";

// Receives the events of the JSON parser, which keeps no recursion of its own, so that nesting
// costs no stack and is refused at the first level that does not belong there. A document tree
// would also have merged duplicate keys before they could be seen.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  [[nodiscard]] SafetensorsHeader take() { return std::move(header_); }

  bool start_object(size_t) override {
    switch (state_) {
      case State::start:
        state_ = State::root;
        return true;
      case State::metadata_value:
        state_ = State::metadata;
        return true;
      case State::entry_value:
        state_ = State::entry;
        return true;
      default:
        unexpected("an object");
    }
  }

  bool end_object() override {
    if (state_ == State::entry) finish_entry();
    state_ = state_ == State::root ? State::end : State::root;
    return true;
  }

  bool key(string_t& name) override {
    if (state_ == State::root) {
      if (!names_.insert(name).second) fail("name " + in_quotes(name) + " appears twice");
      state_ = name == kMetadataKey ? State::metadata_value : State::entry_value;
      entry_ = {};
      entry_.name = name;
      has_dtype_ = has_shape_ = has_offsets_ = false;
    } else if (state_ == State::metadata) {
      metadata_key_ = name;
      if (header_.metadata.count(name) != 0) {
        fail("metadata key " + in_quotes(name) + " appears twice");
      }
      state_ = State::metadata_text;
    } else if (name == "dtype") {
      once(has_dtype_, name);
      state_ = State::dtype;
    } else if (name == "shape") {
      once(has_shape_, name);
      state_ = State::shape_value;
    } else if (name == "data_offsets") {
      once(has_offsets_, name);
      state_ = State::offsets_value;
    } else {
      fail_entry("unknown key " + in_quotes(name));
    }
    return true;
  }

  bool string(string_t& text) override {
    if (state_ == State::metadata_text) {
      header_.metadata.emplace(metadata_key_, text);
      state_ = State::metadata;
    } else if (state_ == State::dtype) {
      const auto dtype = dtype_from_name(text);
      if (!dtype) fail_entry("unknown dtype " + in_quotes(text));
      entry_.dtype = *dtype;
      state_ = State::entry;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::shape_value) {
      state_ = State::shape;
    } else if (state_ == State::offsets_value) {
      state_ = State::offsets;
      offset_count_ = 0;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::offsets && offset_count_ != 2) {
      fail_entry("expected two data_offsets, got " + std::to_string(offset_count_));
    }
    state_ = State::entry;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::shape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) too_large();
      if (entry_.rank == kMaxRank) {
        fail_entry("expected at most " + std::to_string(kMaxRank) + " dimensions");
      }
      entry_.shape[entry_.rank++] = static_cast<int64_t>(value);
    } else if (state_ == State::offsets) {
      if (offset_count_ == 2) fail_entry("expected two data_offsets, got more");
      (offset_count_ == 0 ? entry_.begin : entry_.end) = value;
      ++offset_count_;
    } else {
      unexpected("a number");
    }
    return true;
  }

  bool number_integer(number_integer_t value) override {
    if (state_ != State::shape && state_ != State::offsets) unexpected("a number");
    fail_entry("negative number " + std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    if (state_ != State::shape && state_ != State::offsets) unexpected("a number");
    fail_entry("expected 64-bit integers, got " + in_quotes(text));
  }
  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool binary(binary_t&) override { unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    fail("not valid JSON at byte " + std::to_string(position));
  }

 private:
  // What the next event may belong to; `*_value` waits for the start of that thing.
  enum class State {
    start,
    root,
    metadata_value,
    metadata,
    metadata_text,
    entry_value,
    entry,
    dtype,
    shape_value,
    shape,
    offsets_value,
    offsets,
    end
  };

  [[noreturn]] void fail(const std::string& what) const {
    throw_io(path_, "safetensors header: " + what);
  }
  [[noreturn]] void fail_entry(const std::string& what) const {
    fail("tensor " + in_quotes(entry_.name) + ": " + what);
  }
  [[noreturn]] void too_large() const { fail_entry("size overflows 64 bits"); }

  [[noreturn]] void unexpected(const std::string& got) const {
    switch (state_) {
      case State::start:
        fail("expected an object, got " + got);
      case State::metadata_value:
        fail("expected an object as __metadata__, got " + got);
      case State::metadata_text:
        fail("metadata " + in_quotes(metadata_key_) + ": expected a string, got " + got);
      case State::entry_value:
        fail_entry("expected an object, got " + got);
      case State::dtype:
        fail_entry("expected a string as dtype, got " + got);
      case State::shape_value:
        fail_entry("expected an array as shape, got " + got);
      case State::offsets_value:
        fail_entry("expected an array as data_offsets, got " + got);
      default:
        fail_entry("expected integers, got " + got);
    }
  }

  void once(bool& seen, const std::string& name) const {
    if (seen) fail_entry("key " + in_quotes(name) + " appears twice");
    seen = true;
  }

  void finish_entry() {
    if (!has_dtype_) fail_entry("no dtype");
    if (!has_shape_) fail_entry("no shape");
    if (!has_offsets_) fail_entry("no data_offsets");
    // Zero dimensions count as one in the bound: strides of the other dimensions must fit too.
    auto bound = static_cast<int64_t>(size_of(entry_.dtype));
    bool empty = false;
    for (int axis = 0; axis < entry_.rank; ++axis) {
      empty |= entry_.shape[axis] == 0;
      if (__builtin_mul_overflow(bound, std::max<int64_t>(entry_.shape[axis], 1), &bound)) {
        too_large();
      }
    }
    const uint64_t expected = empty ? 0 : static_cast<uint64_t>(bound);
    if (entry_.end < entry_.begin || entry_.end - entry_.begin != expected) {
      fail_entry("shape and dtype need " + std::to_string(expected) + " bytes, data_offsets are " +
                 std::to_string(entry_.begin) + " and " + std::to_string(entry_.end));
    }
    header_.entries.push_back(std::move(entry_));
  }

  const std::string& path_;
  State state_ = State::start;
  SafetensorsHeader header_;
  std::set<std::string> names_;
  std::string metadata_key_;
  SafetensorsEntry entry_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  int offset_count_ = 0;
};

// Entries sorted by their bytes must follow each other and end with the data section.
void check_layout(const SafetensorsHeader& header, uint64_t data_bytes, const std::string& path) {
  uint64_t position = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin != position) {
      throw_io(path, "safetensors header: tensor " + in_quotes(entry.name) + " starts at byte " +
                         std::to_string(entry.begin) +
                         (entry.begin < position ? ", overlapping the one that ends at "
                                                 : ", leaving a gap after ") +
                         std::to_string(position));
    }
    position = entry.end;
  }
  if (position != data_bytes) {
    throw_io(path, "safetensors: expected " + std::to_string(position) +
                       " bytes of tensor data, got " + std::to_string(data_bytes));
  }
}

}  // namespace

uint64_t parse_header_length(const unsigned char (&bytes)[kHeaderLengthBytes], uint64_t file_size,
                             const std::string& path) {
  uint64_t length = 0;
  for (size_t i = 0; i < kHeaderLengthBytes; ++i) length |= uint64_t{bytes[i]} << (8 * i);
  if (length > file_size - kHeaderLengthBytes) {
    throw_io(path, "safetensors: the header is said to be " + std::to_string(length) +
                       " bytes long, the file has " + std::to_string(file_size) +
                       (length >> 40 != 0 ? "; this is no safetensors file" : ""));
  }
  return length;
}

SafetensorsHeader parse_header(std::string_view json, uint64_t data_bytes,
                               const std::string& path) {
  // The parser would skip a byte-order mark and stop without complaint at a NUL byte.
  if (json.empty() || json.front() != '{') {
    throw_io(path, "safetensors header: expected one JSON object");
  }
  if (const size_t nul = json.find('\0'); nul != std::string_view::npos) {
    throw_io(path, "safetensors header: not valid JSON at byte " + std::to_string(nul + 1));
  }
  HeaderReader reader(path);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  SafetensorsHeader header = reader.take();
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
                   });
  check_layout(header, data_bytes, path);
  return header;
}

std::string format_header(const SafetensorsHeader& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[std::string(kMetadataKey)] = header.metadata;
  for (const SafetensorsEntry& entry : header.entries) {
    nlohmann::ordered_json& item = json[entry.name];
    item["dtype"] = name_of(entry.dtype);
    item["shape"] = std::vector<int64_t>(entry.shape, entry.shape + entry.rank);
    item["data_offsets"] = {entry.begin, entry.end};
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorKind::contract, "safetensors: expected names and metadata in UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length(kHeaderLengthBytes, '\0');
  for (size_t i = 0; i < kHeaderLengthBytes; ++i) {
    length[i] = static_cast<char>(uint64_t{text.size()} >> (8 * i));
  }
  return length + text;
}

}  // namespace ehc::tables
