// `ehc pipeline`: the Engram forward path over a text's ids, timed, checked and explained in JSON.
#include <fmt/core.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/copy_rate.h"
#include "cli/integers.h"
#include "cli/ngram_statistics.h"
#include "cli/output_path.h"
#include "cli/pipeline.h"
#include "cli/progress.h"
#include "cli/text_inputs.h"
#include "core/file_io.h"
#include "ehc/error.h"
#include "ehc/version.h"
#include "tables/npy.h"

namespace ehc::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string ids, map, layout, json;
  PipelineConfig pipeline;
  int64_t tokens = 0;
  int64_t dense_tokens = -1;
  int64_t layer = -1;
  int64_t paragraph_begin = 0;
  int64_t paragraph_tokens = 160;
  int64_t check_chunks = 3;
  int64_t check_tokens = 32;
  size_t top = 20;
  int threads = 0;
};

// Distribution of the gates of each stream, and the gates of one paragraph.
class GateStatistics {
 public:
  GateStatistics(int64_t streams, int64_t begin, int64_t tokens)
      : begin_(begin), end_(begin + tokens), streams_(static_cast<size_t>(streams)) {}

  void add(int64_t first_token, const Tensor& alpha) {
    const auto* values = alpha.as<float>();
    for (int64_t t = 0; t < alpha.shape[0]; ++t) {
      const int64_t token = first_token + t;
      std::vector<float> row(values, values + streams_.size());
      values += streams_.size();
      for (size_t stream = 0; stream < row.size(); ++stream) streams_[stream].add(row[stream]);
      if (token >= begin_ && token < end_) paragraph_.push_back(std::move(row));
    }
  }

  [[nodiscard]] Json to_json() const {
    Json json;
    json["streams"] = Json::array();
    for (const Stream& stream : streams_) json["streams"].push_back(stream.to_json());
    json["paragraph"] = {{"first_token", begin_}, {"alpha", paragraph_}};
    return json;
  }

 private:
  static constexpr size_t kBins = 50;
  struct Stream {
    std::vector<int64_t> histogram = std::vector<int64_t>(kBins, 0);
    int64_t count = 0;
    int64_t nan = 0;  // gates that are no number; they count nowhere else
    double sum = 0, squares = 0, least = 1, most = 0;

    void add(double alpha) {
      if (std::isnan(alpha)) {
        ++nan;
        return;
      }
      const double bin = std::clamp(alpha * kBins, 0.0, kBins - 1.0);
      ++histogram[static_cast<size_t>(bin)];
      ++count;
      sum += alpha;
      squares += alpha * alpha;
      least = std::min(least, alpha);
      most = std::max(most, alpha);
    }
    [[nodiscard]] Json to_json() const {
      if (count == 0) return {{"nan", nan}, {"histogram", histogram}};
      const double mean = sum / static_cast<double>(count);
      const double variance = squares / static_cast<double>(count) - mean * mean;
      return {{"mean", mean}, {"deviation", std::sqrt(std::max(0.0, variance))},
              {"min", least}, {"max", most},
              {"nan", nan},   {"histogram", histogram}};
    }
  };

  int64_t begin_, end_;
  std::vector<Stream> streams_;
  std::vector<std::vector<float>> paragraph_;
};

// Memory is promised generously and missed late, so a table that cannot fit is refused first.
void require_memory(const tables::HashLayout& layout, size_t layer, const Options& options) {
  const PipelineConfig& config = options.pipeline;
  const auto values = [](int64_t a, int64_t b) {
    return static_cast<double>(a) * static_cast<double>(b);
  };
  const int64_t embed = layout.config().columns() * layout.config().row_width;
  const double wanted = 2 * values(layout.rows()[layer], layout.config().row_width) +
                        2 * values(embed, (config.streams + 1) * config.width) +
                        2 * values(config.chunk, embed + (5 * config.streams + 1) * config.width);
  const double present =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (wanted > 0.8 * present) {
    throw Error(ErrorKind::unavailable,
                fmt::format("memory: table, weights and chunk need {:.1f} GB of this machine's "
                            "{:.1f}; take a smaller layout, --width or --chunk",
                            wanted * 1e-9, present * 1e-9));
  }
}

Json stages_json(const std::vector<StageTime>& times, double ceiling) {
  Json json = Json::array();
  for (const StageTime& time : times) {
    if (time.tokens == 0) continue;
    const double best_bytes = time.best_tokens_per_second * time.bytes_per_token;
    json.push_back(
        {{"stage", time.name},
         {"op", time.op},
         {"implementation", time.implementation},
         {"tokens", time.tokens},
         {"seconds", time.seconds},
         {"tokens_per_second", static_cast<double>(time.tokens) / time.seconds},
         {"best_tokens_per_second", time.best_tokens_per_second},
         {"bytes_per_token", time.bytes_per_token},
         {"best_gb_per_second", best_bytes * 1e-9},
         {"share_of_copy", best_bytes / ceiling},
         {"best_gflop_per_second", time.best_tokens_per_second * time.flop_per_token * 1e-9}});
  }
  return json;
}

int64_t distinct_raw_ids(const Tensor& ids, int64_t vocab) {
  std::vector<bool> seen(static_cast<size_t>(vocab), false);
  int64_t distinct = 0;
  for (int64_t t = 0; t < ids.shape[0]; ++t) {
    const auto id = static_cast<size_t>(integer_at(ids, t));
    distinct += seen[id] ? 0 : 1;
    seen[id] = true;
  }
  return distinct;
}

Json configuration_json(const tables::HashLayout& layout, size_t layer, const Options& options,
                        const Context& context, int64_t tokens, int64_t dense) {
  const tables::HashLayoutConfig& config = layout.config();
  return {{"tokens", tokens},
          {"dense_tokens", dense},
          {"chunk", options.pipeline.chunk},
          {"threads", context.executor().concurrency()},
          {"layer", config.layer_ids[layer]},
          {"rows", layout.rows()[layer]},
          {"row_width", config.row_width},
          {"max_ngram", config.max_ngram()},
          {"heads", config.heads},
          {"rows_per_token", config.columns()},
          {"table_bytes", 2 * layout.rows()[layer] * config.row_width},
          {"streams", options.pipeline.streams},
          {"width", options.pipeline.width},
          {"seed", options.pipeline.seed}};
}

// A chunk in the middle of its share of the text, so that history and state are at work.
bool is_sampled(int64_t chunk, int64_t chunks, int64_t samples) {
  return chunk * samples / chunks != (chunk + 1) * samples / chunks;
}

Json run_pipeline(const Options& options) {
  const text::TokenMap map = text::TokenMap::load(options.map);
  const tables::HashLayout layout = tables::HashLayout::load(options.layout);
  const tables::NpyArray file = tables::read_npy(options.ids);
  const Tensor ids = usable_ids(file, options.ids, options.tokens);
  const size_t layer = find_layer(layout, options.layout, options.layer);
  require_fitting(map, options.map, layout, options.layout);
  require_memory(layout, layer, options);
  const int64_t tokens = ids.shape[0];
  // Whole chunks.
  const int64_t chunk = options.pipeline.chunk;
  const int64_t chunks = (tokens + chunk - 1) / chunk;
  const int64_t dense_chunks = options.dense_tokens < 0
                                   ? chunks
                                   : std::min(chunks, (options.dense_tokens + chunk - 1) / chunk);

  Context context = Context::cpu(options.threads);
  const double ceiling = CopyRate(context).measure();
  Pipeline pipeline(context, map, layout, layer, options.pipeline);
  NgramStatistics ngrams(layout, layer);
  GateStatistics gates(options.pipeline.streams, options.paragraph_begin, options.paragraph_tokens);
  Checksum index_sum;
  Checksum stream_sum;
  std::vector<int64_t> rows;
  {
    Progress progress("text to streams", static_cast<size_t>(tokens));
    for (int64_t at = 0; at < chunks; ++at) {
      const int64_t begin = at * chunk;
      const Tensor ids_here = ids.slice(0, begin, std::min(tokens, begin + chunk));
      const bool is_dense = at < dense_chunks;
      progress.show(static_cast<size_t>(begin), "tokens");
      pipeline.address(ids_here);
      const Tensor indices = pipeline.indices();
      index_sum.add(indices);
      rows.resize(static_cast<size_t>(indices.numel()));
      for (size_t i = 0; i < rows.size(); ++i) {
        rows[i] = integer_at(indices, static_cast<int64_t>(i));
      }
      ngrams.add(begin, ids_here.shape[0], pipeline.window().as<int32_t>(), rows.data());
      if (is_dense) {
        pipeline.update_streams(ids_here);
        gates.add(begin, pipeline.alpha());
        stream_sum.add(pipeline.streams());
      }
      if (is_sampled(at, is_dense ? dense_chunks : chunks, options.check_chunks)) {
        pipeline.check(ids_here, options.check_tokens, is_dense);
      }
    }
  }

  Json json;
  json["version"] = EHC_VERSION_STRING;
  json["configuration"] = configuration_json(layout, layer, options, context, tokens,
                                             std::min(tokens, dense_chunks * chunk));
  json["vocabulary"] = {{"ids", map.vocab_size()},
                        {"compressed_ids", map.size()},
                        {"ids_in_text", distinct_raw_ids(ids, map.vocab_size())},
                        {"compressed_ids_in_text", ngrams.distinct_ids()}};
  json["copy_gb_per_second"] = ceiling * 1e-9;
  json["stages"] = stages_json(pipeline.times(), ceiling);
  json["checks"] = pipeline.checks();
  json["checksums"] = {{"indices", index_sum.text()}, {"streams", stream_sum.text()}};
  json["rows_touched"] = ngrams.rows_touched();
  json["orders"] = ngrams.orders(options.top);
  json["gate"] = gates.to_json();
  return json;
}

void print_summary(const Json& json) {
  fmt::print("{:<12} {:<16} {:>10} {:>10} {:>12} {:>9} {:>8}\n", "stage", "implementation",
             "tokens", "seconds", "tokens/s", "GB/s", "of copy");
  for (const Json& stage : json["stages"]) {
    fmt::print("{:<12} {:<16} {:>10} {:>10.4f} {:>12.4g} {:>9.2f} {:>8.2f}\n",
               stage["stage"].get<std::string>(), stage["implementation"].get<std::string>(),
               stage["tokens"].get<int64_t>(), stage["seconds"].get<double>(),
               stage["best_tokens_per_second"].get<double>(),
               stage["best_gb_per_second"].get<double>(), stage["share_of_copy"].get<double>());
  }
  fmt::print("indices {}  streams {}\n", json["checksums"]["indices"].get<std::string>(),
             json["checksums"]["streams"].get<std::string>());
}

void run(const Options& options) {
  if (!options.json.empty()) require_writable(options.json);
  const Json json = run_pipeline(options);
  if (!options.json.empty()) {
    const std::string text = json.dump(1) + "\n";
    const std::string_view parts[] = {text};
    write_file(options.json, parts);
  }
  print_summary(json);
  for (const Json& check : json["checks"]) {
    if (check["equal"].get<bool>()) continue;
    fmt::print(stderr, "ehc: {}: '{}' differs from the reference by up to {:.3g}\n",
               check["op"].get<std::string>(), check["output"].get<std::string>(),
               check["max_error"].get<double>());
    throw Exit{kDifferent};
  }
}

}  // namespace

void add_pipeline_command(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "pipeline",
      "Run the Engram forward path over a text's ids: map, window, hash, gather, "
      "projection, gate, convolution, streams");
  command->add_option("--ids", o->ids, "raw token ids, .npy, I32 or I64[T]")->required();
  command->add_option("--map", o->map, "token map (ehc tokmap build)")->required();
  command->add_option("--layout", o->layout, "hash layout (ehc layout)")->required();
  command->add_option("--json", o->json, "file to write all figures to");
  command->add_option("--layer", o->layer, "layer id of the layout (default: its first)");
  command->add_option("--tokens", o->tokens, "read only this many tokens (default: all)")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--dense-tokens", o->dense_tokens,
                   "run the stages after the hash for only this many (default: all)")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--chunk", o->pipeline.chunk, "tokens at a time")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--streams", o->pipeline.streams, "residual streams")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  command->add_option("--width", o->pipeline.width, "values per stream")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--seed", o->pipeline.seed, "of table, weights and incoming streams")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--paragraph-begin", o->paragraph_begin, "first token whose gates are listed")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--paragraph-tokens", o->paragraph_tokens, "how many")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--check-chunks", o->check_chunks, "chunks compared with the reference")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--check-tokens", o->check_tokens, "tokens of each of them")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--top", o->top, "most frequent n-grams listed per order")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--threads", o->threads, "0: all cores")
      ->envname("EHC_THREADS")
      ->check(CLI::NonNegativeNumber);
  command->callback([o] { run(*o); });
}

}  // namespace ehc::cli
