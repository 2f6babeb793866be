// `ehc layout`: shows, writes and checks the hash layout of n-gram tables.
#include <fmt/core.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "ehc/error.h"
#include "ehc/table.h"
#include "tables/layout_json.h"

namespace ehc::cli {
namespace {

using tables::HashLayout;
using tables::HashLayoutConfig;
using tables::MultiplierScheme;
using tables::WindowBlocking;

constexpr const char* kDemo = "demo";
constexpr const char* kDeepseek = "deepseek-v4.1";
constexpr const char* kQwen = "qwen3.8";

// What the command line says; what it leaves out comes from the preset.
struct ShowOptions {
  std::string preset;
  std::vector<int64_t> sizes;
  std::vector<int64_t> layer_ids;
  std::optional<int64_t> heads;
  std::optional<int64_t> max_ngram;
  std::optional<int64_t> row_width;
  std::optional<int64_t> compressed_vocab;
  std::optional<int64_t> seed;
  std::optional<int64_t> pad_id;
  std::optional<int64_t> reset_id;
  std::string scheme;
  std::string blocking;
  std::string index_dtype = "I64";
  bool json = false;
  std::string output;
};

[[noreturn]] void throw_usage(const std::string& what) { throw UsageError("layout: " + what); }

HashLayoutConfig preset_config(const ShowOptions& options) {
  if (options.preset == kDeepseek) return HashLayoutConfig::deepseek_v4_1();
  if (options.preset == kQwen) return HashLayoutConfig::qwen3_8();
  if (options.preset == kDemo) {
    if (!options.compressed_vocab) {
      throw_usage(
          "preset 'demo': expected --compressed-vocab (the size of the tokenizer's token map), got "
          "none");
    }
    return HashLayoutConfig::demo(*options.compressed_vocab);
  }
  HashLayoutConfig config;
  config.row_width = 1;
  const auto require = [](bool given, const char* option) {
    if (!given) throw_usage(fmt::format("expected {} or a --preset, got neither", option));
  };
  require(!options.sizes.empty(), "--sizes");
  require(!options.layer_ids.empty(), "--layers");
  require(options.compressed_vocab.has_value(), "--compressed-vocab");
  return config;
}

HashLayoutConfig make_config(const ShowOptions& options) {
  HashLayoutConfig config = preset_config(options);
  if (!options.sizes.empty()) config.sizes = options.sizes;
  if (options.max_ngram) {
    const int64_t orders = *options.max_ngram - 1;
    if (config.sizes.size() == 1 && orders >= 1 && orders <= 7) {
      config.sizes.resize(static_cast<size_t>(orders), config.sizes.front());
    }
    if (config.max_ngram() != *options.max_ngram) {
      throw_usage(fmt::format("--sizes: expected one size or one per order 2..{}, got {}",
                              *options.max_ngram, config.sizes.size()));
    }
  }
  if (!options.layer_ids.empty()) config.layer_ids = options.layer_ids;
  config.heads = options.heads.value_or(config.heads);
  config.row_width = options.row_width.value_or(config.row_width);
  config.compressed_vocab = options.compressed_vocab.value_or(config.compressed_vocab);
  config.seed = options.seed.value_or(config.seed);
  config.pad_id = options.pad_id.value_or(config.pad_id);
  config.reset_id = options.reset_id.value_or(config.reset_id);
  if (!options.scheme.empty()) {
    config.scheme = options.scheme == name_of(MultiplierScheme::numpy)
                        ? MultiplierScheme::numpy
                        : MultiplierScheme::splitmix64;
  }
  if (!options.blocking.empty()) {
    config.blocking = options.blocking == name_of(WindowBlocking::slot) ? WindowBlocking::slot
                                                                        : WindowBlocking::farther;
  }
  return config;
}

// Row `row` of a row-major list whose rows are `width` long.
template <class T>
std::vector<T> row_of(const std::vector<T>& values, size_t row, size_t width) {
  const auto begin = values.begin() + static_cast<std::ptrdiff_t>(row * width);
  return {begin, begin + static_cast<std::ptrdiff_t>(width)};
}

nlohmann::ordered_json to_json(const HashLayout& layout) {
  const HashLayoutConfig& config = layout.config();
  nlohmann::ordered_json json = tables::config_json(config);
  json["max_ngram"] = config.max_ngram();
  json["index_dtype"] = name_of(layout.index_dtype());
  json["rows"] = layout.rows();
  const auto orders = config.sizes.size();
  const auto heads = static_cast<size_t>(config.heads);
  for (size_t layer = 0; layer < config.layer_ids.size(); ++layer) {
    json["multipliers"].push_back(row_of(layout.multipliers(), layer, orders + 1));
    json["offsets"].push_back(row_of(layout.offsets(), layer, orders * heads));
    nlohmann::ordered_json sizes = nlohmann::ordered_json::array();
    for (size_t order = 0; order < orders; ++order) {
      sizes.push_back(row_of(layout.vocab_sizes(), layer * orders + order, heads));
    }
    json["vocab_sizes"].push_back(std::move(sizes));
  }
  return json;
}

void print_layout(const HashLayout& layout) {
  const HashLayoutConfig& config = layout.config();
  fmt::print(
      "layers {}, orders 2..{}, {} heads, {} values per row, {} ids, multipliers {} seed {}\n",
      fmt::join(config.layer_ids, " "), config.max_ngram(), config.heads, config.row_width,
      config.compressed_vocab, name_of(config.scheme), config.seed);
  fmt::print("window: pad id {}, reset id {}, blocking {}\n", config.pad_id, config.reset_id,
             name_of(config.blocking));
  const auto orders = config.sizes.size();
  const auto heads = static_cast<size_t>(config.heads);
  for (size_t layer = 0; layer < config.layer_ids.size(); ++layer) {
    fmt::print("\nlayer {}: {} rows, {} per token, {} indices\n", config.layer_ids[layer],
               layout.rows()[layer], config.columns(), name_of(layout.index_dtype()));
    fmt::print("  multipliers  {}\n",
               fmt::join(row_of(layout.multipliers(), layer, orders + 1), " "));
    for (size_t order = 0; order < orders; ++order) {
      fmt::print("  order {}      {}\n", order + 2,
                 fmt::join(row_of(layout.vocab_sizes(), layer * orders + order, heads), " "));
    }
  }
}

void show(const ShowOptions& options) {
  const DType index_dtype = options.index_dtype == "I32" ? DType::i32 : DType::i64;
  const HashLayout layout = HashLayout::make(make_config(options), index_dtype);
  if (!options.output.empty()) layout.save(options.output);
  if (options.json) {
    fmt::print("{}\n", to_json(layout).dump());
  } else {
    print_layout(layout);
  }
}

void check(const std::string& path) {
  const HashLayout layout = HashLayout::load(path, /*checked=*/false);
  std::string first_fault;
  for (const tables::LayoutCheck& result : layout.check()) {
    fmt::print("{:<46} {}\n", result.law, result.holds ? "ok" : "BROKEN: " + result.fault);
    if (!result.holds && first_fault.empty()) first_fault = result.law + ": " + result.fault;
  }
  if (!first_fault.empty()) throw Error(ErrorKind::io, path + ": " + first_fault);
}

void add_show(CLI::App& layout) {
  const auto options = std::make_shared<ShowOptions>();
  CLI::App* command =
      layout.add_subcommand("show", "Derive a layout, print it, write it to a file");
  command->add_option("--preset", options->preset, "Published layout to start from")
      ->check(CLI::IsMember({kDemo, kDeepseek, kQwen}));
  command->add_option("--sizes", options->sizes, "Start of the prime search per order, e.g. 50,20")
      ->delimiter(',');
  command->add_option("--layers", options->layer_ids, "Layers that own a table, e.g. 1,14")
      ->delimiter(',');
  command->add_option("--heads", options->heads, "Rows per order (8)");
  command->add_option("--max-ngram", options->max_ngram,
                      "Largest order; with one size, that size serves every order");
  command->add_option("--row-width", options->row_width, "Values per row");
  command->add_option("--compressed-vocab", options->compressed_vocab, "Number of ids hashed");
  command->add_option("--seed", options->seed, "Seed of the multipliers (0)");
  command->add_option("--scheme", options->scheme, "Generator of the multipliers")
      ->check(CLI::IsMember({"numpy", "splitmix64"}));
  command->add_option("--pad-id", options->pad_id, "Id of blocked window slots");
  command->add_option("--reset-id", options->reset_id, "Id that ends the look-back, -1 for none");
  command->add_option("--blocking", options->blocking, "What a blocked slot blocks")
      ->check(CLI::IsMember({"slot", "farther"}));
  command->add_option("--index-dtype", options->index_dtype, "I32 refuses layers that need I64")
      ->check(CLI::IsMember({"I32", "I64"}));
  command->add_flag("--json", options->json, "Print JSON");
  command->add_option("-o,--output", options->output, "Write the layout to this file");
  command->callback([options] { show(*options); });
}

void add_check(CLI::App& layout) {
  const auto path = std::make_shared<std::string>();
  CLI::App* command = layout.add_subcommand("check", "Check a layout file against its laws");
  command->add_option("FILE", *path, "File written by show -o")->required();
  command->callback([path] { check(*path); });
}

}  // namespace

void add_layout_command(CLI::App& app) {
  CLI::App* layout = app.add_subcommand("layout", "Hash layouts: multipliers, primes, offsets");
  layout->require_subcommand(1);
  add_show(*layout);
  add_check(*layout);
}

}  // namespace ehc::cli
