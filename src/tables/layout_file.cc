// HashLayout as a safetensors file.
#include <algorithm>

#include "core/text.h"
#include "ehc/error.h"
#include "ehc/table.h"
#include "tables/layout_json.h"
#include "tables/safetensors.h"

namespace ehc::tables {
namespace {

constexpr const char* kMetadataKey = "ehc_layout";
constexpr int kVersion = 1;

// Strict access: every field is there, has its type, and nothing else is.
class FieldReader {
 public:
  FieldReader(const std::string& path, const std::string& text) : path_(path) {
    json_ = nlohmann::json::parse(text, nullptr, false);
    if (!json_.is_object()) fail("expected a JSON object");
  }

  int64_t integer(const char* name) { return to_integer(name, take(name)); }

  std::vector<int64_t> integers(const char* name) {
    const nlohmann::json list = take(name);
    if (!list.is_array()) fail(std::string("field '") + name + "': expected a list of integers");
    std::vector<int64_t> values;
    for (const nlohmann::json& item : list) values.push_back(to_integer(name, item));
    return values;
  }

  template <class Enum>
  Enum choice(const char* name, Enum first, Enum second) {
    const nlohmann::json value = take(name);
    for (const Enum option : {first, second}) {
      if (value.is_string() && value.get_ref<const std::string&>() == name_of(option)) {
        return option;
      }
    }
    fail(std::string("field '") + name + "': expected " + std::string(name_of(first)) + " or " +
         std::string(name_of(second)));
  }

  void finish() const {
    if (!json_.empty()) fail("unknown field " + in_quotes(json_.begin().key()));
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw_io(path_, std::string("metadata '") + kMetadataKey + "': " + what);
  }

 private:
  nlohmann::json take(const char* name) {
    const auto found = json_.find(name);
    if (found == json_.end()) fail(std::string("no field '") + name + "'");
    nlohmann::json value = std::move(*found);
    json_.erase(found);
    return value;
  }

  [[nodiscard]] int64_t to_integer(const char* name, const nlohmann::json& value) const {
    constexpr auto kLargest = static_cast<uint64_t>(INT64_MAX);
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= kLargest);
    if (!fits) fail(std::string("field '") + name + "': expected 64-bit integers");
    return value.get<int64_t>();
  }

  const std::string& path_;
  nlohmann::json json_;
};

HashLayoutConfig read_config(const std::string& path, const std::string& text) {
  FieldReader fields(path, text);
  const int64_t version = fields.integer("version");
  if (version != kVersion) {
    fields.fail("expected version " + std::to_string(kVersion) + ", got " +
                std::to_string(version));
  }
  HashLayoutConfig config;
  config.layer_ids = fields.integers("layer_ids");
  config.sizes = fields.integers("sizes");
  config.heads = fields.integer("heads");
  config.row_width = fields.integer("row_width");
  config.compressed_vocab = fields.integer("compressed_vocab");
  config.seed = fields.integer("seed");
  config.scheme = fields.choice("scheme", MultiplierScheme::numpy, MultiplierScheme::splitmix64);
  config.blocking = fields.choice("blocking", WindowBlocking::slot, WindowBlocking::farther);
  config.pad_id = fields.integer("pad_id");
  config.reset_id = fields.integer("reset_id");
  fields.finish();
  return config;
}

template <class T>
std::vector<T> read_tensor(const SafetensorsFile& file, const std::string& path,
                           const std::string& name, DType dtype,
                           const std::vector<int64_t>& shape) {
  const Tensor tensor = file.find(name);
  if (!tensor) throw_io(path, "not a hash layout: no tensor '" + name + "'");
  if (tensor.dtype != dtype || tensor.rank != static_cast<int>(shape.size()) ||
      !std::equal(shape.begin(), shape.end(), tensor.shape)) {
    throw_io(path, "tensor '" + name + "': dtype or shape does not fit the configuration");
  }
  return std::vector<T>(tensor.as<T>(), tensor.as<T>() + tensor.numel());
}

}  // namespace

nlohmann::ordered_json config_json(const HashLayoutConfig& config) {
  return {{"layer_ids", config.layer_ids},
          {"sizes", config.sizes},
          {"heads", config.heads},
          {"row_width", config.row_width},
          {"compressed_vocab", config.compressed_vocab},
          {"seed", config.seed},
          {"scheme", name_of(config.scheme)},
          {"blocking", name_of(config.blocking)},
          {"pad_id", config.pad_id},
          {"reset_id", config.reset_id}};
}

void HashLayout::save(const std::string& path) const {
  nlohmann::ordered_json metadata = {{"version", kVersion}};
  metadata.update(config_json(config_));
  const NamedTensor tensors[] = {{"multipliers", multipliers_tensor()},
                                 {"vocab_sizes", vocab_sizes_tensor()},
                                 {"offsets", offsets_tensor()},
                                 {"rows", {rows_.data(), DType::i64, {config_.layers()}}}};
  write_safetensors(path, tensors, {{kMetadataKey, metadata.dump()}});
}

HashLayout HashLayout::load(const std::string& path, bool checked) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto metadata = file.metadata().find(kMetadataKey);
  if (metadata == file.metadata().end()) {
    throw_io(path, std::string("not a hash layout: no metadata '") + kMetadataKey + "'");
  }
  HashLayout layout;
  layout.config_ = read_config(path, metadata->second);
  const int64_t layers = layout.config_.layers();
  const int64_t orders = layout.config_.max_ngram() - 1;
  const int64_t heads = layout.config_.heads;
  layout.vocab_sizes_ =
      read_tensor<int32_t>(file, path, "vocab_sizes", DType::i32, {layers, orders, heads});
  layout.multipliers_ =
      read_tensor<int64_t>(file, path, "multipliers", DType::i64, {layers, orders + 1});
  layout.offsets_ =
      read_tensor<int64_t>(file, path, "offsets", DType::i64, {layers, layout.config_.columns()});
  layout.rows_ = read_tensor<int64_t>(file, path, "rows", DType::i64, {layers});
  if (file.tensors().size() != 4) throw_io(path, "not a hash layout: unknown tensors");
  if (checked) {
    for (const LayoutCheck& result : layout.check()) {
      if (!result.holds) throw_io(path, result.law + ": " + result.fault);
    }
  }
  return layout;
}

}  // namespace ehc::tables
