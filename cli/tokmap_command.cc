// `ehc tokmap`: builds, shows and verifies the map from a tokenizer's ids to compressed ids.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "ehc/text.h"

namespace ehc::cli {
namespace {

using text::TokenMap;
using Json = nlohmann::ordered_json;

// The tokens that share one compressed id.
struct TokenClass {
  int32_t compressed_id = 0;
  int64_t size = 0;
  std::vector<int64_t> first_ids;
};

constexpr size_t kShownMembers = 5;

double reduction(const TokenMap& map) {
  return map.vocab_size() == 0
             ? 0.0
             : 1.0 - static_cast<double>(map.size()) / static_cast<double>(map.vocab_size());
}

// The `count` largest classes; of two of one size, the one that appears first.
std::vector<TokenClass> largest_classes(const TokenMap& map, size_t count) {
  std::vector<TokenClass> classes(static_cast<size_t>(map.size()));
  for (int64_t id = 0; id < map.vocab_size(); ++id) {
    const int32_t compressed_id = map.table()[static_cast<size_t>(id)];
    TokenClass& members = classes[static_cast<size_t>(compressed_id)];
    members.compressed_id = compressed_id;
    ++members.size;
    if (members.first_ids.size() < kShownMembers) members.first_ids.push_back(id);
  }
  std::stable_sort(classes.begin(), classes.end(),
                   [](const TokenClass& a, const TokenClass& b) { return a.size > b.size; });
  if (classes.size() > count) classes.resize(count);
  return classes;
}

Json describe(const TokenMap& map, const std::optional<text::Vocabulary>& vocabulary,
              size_t class_count) {
  Json json;
  json["vocab_size"] = map.vocab_size();
  json["compressed_vocab_size"] = map.size();
  json["reduction"] = reduction(map);
  json["unicode_tables"] = text::unicode_table_version();
  json["source_bytes"] = map.source_bytes();
  json["source_xxh64"] = fmt::format("{:016x}", map.source_hash());
  json["largest_classes"] = Json::array();
  for (const TokenClass& members : largest_classes(map, class_count)) {
    Json entry;
    entry["compressed_id"] = members.compressed_id;
    entry["size"] = members.size;
    entry["first_ids"] = members.first_ids;
    if (vocabulary) {
      entry["first_texts"] = Json::array();
      for (const int64_t id : members.first_ids) {
        entry["first_texts"].push_back(vocabulary->text(id));
      }
    }
    json["largest_classes"].push_back(entry);
  }
  return json;
}

void print_for_people(const Json& json) {
  fmt::print("ids             {}\n", json["vocab_size"].get<int64_t>());
  fmt::print("compressed ids  {} ({:.2f} % fewer)\n", json["compressed_vocab_size"].get<int64_t>(),
             100.0 * json["reduction"].get<double>());
  fmt::print("Unicode tables  {}\n", json["unicode_tables"].get<std::string>());
  fmt::print("source          {} bytes, XXH64 {}\n", json["source_bytes"].get<uint64_t>(),
             json["source_xxh64"].get<std::string>());
  if (json["largest_classes"].empty()) return;
  fmt::print("largest classes\n  {:>13}  {:>6}  {}\n", "compressed id", "tokens", "first of them");
  for (const Json& entry : json["largest_classes"]) {
    const Json& members = entry.contains("first_texts") ? entry["first_texts"] : entry["first_ids"];
    std::string line;
    for (const Json& member : members) line += (line.empty() ? "" : ", ") + member.dump();
    fmt::print("  {:>13}  {:>6}  {}\n", entry["compressed_id"].get<int64_t>(),
               entry["size"].get<int64_t>(), line);
  }
}

void add_build(CLI::App& tokmap) {
  struct Options {
    std::string tokenizer, output;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = tokmap.add_subcommand("build", "Build the map of a tokenizer.json");
  command->add_option("tokenizer", options->tokenizer, "tokenizer.json (byte-level BPE)")
      ->required();
  command->add_option("-o,--output", options->output, "map file to write")->required();
  command->callback([options] {
    const auto start = std::chrono::steady_clock::now();
    const TokenMap map = TokenMap::build(options->tokenizer);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    map.save(options->output);
    fmt::print("{} ids -> {} ({:.2f} % fewer) in {:.3f} s\n", map.vocab_size(), map.size(),
               100.0 * reduction(map), seconds.count());
  });
}

void add_show(CLI::App& tokmap) {
  struct Options {
    std::string map, tokenizer;
    size_t classes = 10;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = tokmap.add_subcommand("show", "Show what a map file holds");
  command->add_option("map", options->map, "map file")->required();
  command->add_option("--tokenizer", options->tokenizer,
                      "the map's tokenizer.json: adds the texts of the tokens");
  command->add_option("--classes", options->classes, "how many of the largest classes to list")
      ->capture_default_str();
  command->add_flag("--json", options->json, "print JSON");
  command->callback([options] {
    const TokenMap map = TokenMap::load(options->map);
    std::optional<text::Vocabulary> vocabulary;
    if (!options->tokenizer.empty()) {
      map.verify(options->tokenizer);
      vocabulary = text::read_tokenizer_json(options->tokenizer);
    }
    const Json json = describe(map, vocabulary, options->classes);
    if (options->json) {
      fmt::print("{}\n", json.dump(1));
    } else {
      print_for_people(json);
    }
  });
}

void add_verify(CLI::App& tokmap) {
  struct Options {
    std::string map, tokenizer;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command =
      tokmap.add_subcommand("verify", "Check that a map file is the one a tokenizer.json gives");
  command->add_option("map", options->map, "map file")->required();
  command->add_option("--tokenizer", options->tokenizer, "tokenizer.json")->required();
  command->callback([options] {
    const TokenMap map = TokenMap::load(options->map);
    map.verify(options->tokenizer);
    fmt::print("{} is the map of {}\n", options->map, options->tokenizer);
  });
}

}  // namespace

void add_tokmap_command(CLI::App& app) {
  CLI::App* tokmap =
      app.add_subcommand("tokmap", "The map from a tokenizer's ids to compressed ids");
  tokmap->require_subcommand(1);
  add_build(*tokmap);
  add_show(*tokmap);
  add_verify(*tokmap);
}

}  // namespace ehc::cli
