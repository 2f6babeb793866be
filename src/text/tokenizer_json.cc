#include "text/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "core/file_io.h"
#include "ehc/error.h"
#include "text/utf8.h"

namespace ehc::text {
namespace {

constexpr size_t kMaxJsonBytes = size_t{1} << 30;
constexpr uint64_t kMaxId = std::numeric_limits<int32_t>::max();

// Shortens what comes out of the file for error texts, and keeps them on one line of UTF-8.
std::string shown(std::string_view text) {
  constexpr size_t kLongest = 160;
  std::string line;
  append_utf8_lossy(text.substr(0, kLongest), line);
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < 0x20; }, ' ');
  return text.size() > kLongest ? line + "..." : line;
}

// A token of the vocabulary or an added one; its characters lie in TokenizerSax::strings.
struct Token {
  size_t begin = 0;
  size_t length = 0;
  int32_t id = -1;
};

// Streams through the file and keeps what the token map needs; merges and the rest pass by.
class TokenizerSax final {
 public:
  using Json = nlohmann::json;

  explicit TokenizerSax(const std::string& path) : path_(path) {}

  std::string strings;
  std::vector<Token> vocab;
  std::vector<Token> added;
  bool has_vocab = false;
  bool has_merges = false;
  std::string model_type;
  std::vector<std::string> decoder_types;  // of the decoder and, if a Sequence, of its members

  [[nodiscard]] std::string_view string_of(const Token& token) const {
    return std::string_view(strings).substr(token.begin, token.length);
  }

  [[noreturn]] void fail(const std::string& what) const { throw_io(path_, what); }

  // The interface of the SAX parser.
  bool key(std::string& name) {
    key_ = std::move(name);
    if (scope() == Scope::root || scope() == Scope::model) refuse_second_section();
    return true;
  }
  bool start_object(size_t) {
    check(Kind::object, "an object");
    const Scope parent = scope();
    Scope inner = Scope::other;
    if (parent == Scope::document) inner = Scope::root;
    if (parent == Scope::root && key_ == "model") inner = Scope::model;
    if (parent == Scope::root && key_ == "decoder") inner = Scope::decoder;
    if (parent == Scope::model && key_ == "vocab") inner = Scope::vocab;
    if (parent == Scope::added_tokens) inner = Scope::added_token;
    if (parent == Scope::decoder_list) inner = Scope::decoder;
    if (inner == Scope::vocab) has_vocab = true;
    if (inner == Scope::added_token) {
      added_token_ = Token{};
      has_content_ = false;
    }
    scopes_.push_back(inner);
    return true;
  }
  bool end_object() {
    if (scope() == Scope::added_token) {
      if (added_token_.id < 0 || !has_content_) fail(where() + ": expected 'id' and 'content'");
      added.push_back(added_token_);
    }
    scopes_.pop_back();
    return true;
  }
  bool start_array(size_t) {
    check(Kind::array, "an array");
    Scope inner = Scope::other;
    if (scope() == Scope::root && key_ == "added_tokens") inner = Scope::added_tokens;
    if (scope() == Scope::decoder && key_ == "decoders") inner = Scope::decoder_list;
    if (scope() == Scope::model && key_ == "merges") has_merges = true;
    scopes_.push_back(inner);
    return true;
  }
  bool end_array() {
    scopes_.pop_back();
    return true;
  }
  bool string(std::string& value) {
    check(Kind::string, "a string");
    if (scope() == Scope::added_token && key_ == "content") {
      has_content_ = true;
      keep_string(value, added_token_);
    }
    if (scope() == Scope::model && key_ == "type") model_type = value;
    if (scope() == Scope::decoder && key_ == "type") decoder_types.push_back(value);
    return true;
  }
  bool number_unsigned(uint64_t value) {
    check(value <= kMaxId ? Kind::id : Kind::other, "a number that is too large");
    if (scope() == Scope::vocab) {
      Token& token = vocab.emplace_back();
      keep_string(key_, token);
      token.id = static_cast<int32_t>(value);
    } else if (scope() == Scope::added_token && key_ == "id") {
      added_token_.id = static_cast<int32_t>(value);
    }
    return true;
  }
  bool number_integer(int64_t) { return check(Kind::other, "a negative number"); }
  bool number_float(double, const std::string&) {
    return check(Kind::other, "a number that is not an integer");
  }
  bool boolean(bool) { return check(Kind::other, "true or false"); }
  bool null() { return check(Kind::other, "null"); }
  bool binary(Json::binary_t&) { return check(Kind::other, "binary data"); }
  bool parse_error(size_t position, const std::string&, const Json::exception& error) {
    std::string what = error.what();
    what.resize(std::min(what.find("; last read"), what.size()));
    what.erase(0, what.find("] ") + 2);  // "[json.exception.parse_error.101] "
    fail("not valid JSON at byte " + std::to_string(position) + ": " + shown(what));
  }

 private:
  enum class Kind : uint8_t { any, object, array, string, id, other };
  // What the innermost open object or array is.
  enum class Scope : uint8_t {
    document,
    root,
    model,
    vocab,
    added_tokens,
    added_token,
    decoder,
    decoder_list,
    other
  };

  [[nodiscard]] Scope scope() const { return scopes_.empty() ? Scope::document : scopes_.back(); }

  // A second one would silently replace the first.
  void refuse_second_section() {
    if (scope() == Scope::root && key_ != "model" && key_ != "added_tokens" && key_ != "decoder") {
      return;
    }
    if (scope() == Scope::model && key_ != "vocab" && key_ != "type") return;
    if (std::find(sections_.begin(), sections_.end(), key_) != sections_.end()) {
      fail("key '" + key_ + "' appears twice");
    }
    sections_.push_back(key_);
  }

  [[nodiscard]] Kind expected_kind() const {
    switch (scope()) {
      case Scope::document:
      case Scope::added_tokens:
      case Scope::decoder_list:
        return Kind::object;
      case Scope::vocab:
        return Kind::id;
      case Scope::root:
        return key_ == "model" ? Kind::object : key_ == "added_tokens" ? Kind::array : Kind::any;
      case Scope::model:
        return key_ == "vocab" ? Kind::object : key_ == "type" ? Kind::string : Kind::any;
      case Scope::added_token:
        return key_ == "id" ? Kind::id : key_ == "content" ? Kind::string : Kind::any;
      case Scope::decoder:
        return key_ == "type" ? Kind::string : key_ == "decoders" ? Kind::array : Kind::any;
      case Scope::other:
        return Kind::any;
    }
    return Kind::any;
  }

  bool check(Kind kind, const char* got) const {
    const Kind expected = expected_kind();
    if (expected == Kind::any || expected == kind) return true;
    const char* name = expected == Kind::object   ? "an object"
                       : expected == Kind::array  ? "an array"
                       : expected == Kind::string ? "a string"
                                                  : "an id from 0 to 2147483647";
    fail(where() + ": expected " + name + ", got " + (kind == Kind::id ? "a number" : got));
  }

  [[nodiscard]] std::string where() const {
    switch (scope()) {
      case Scope::document:
        return "the document";
      case Scope::added_tokens:
      case Scope::added_token:
        return "added token number " + std::to_string(added.size());
      case Scope::vocab:
        return "token '" + shown(key_) + "'";
      default:
        return "key '" + shown(key_) + "'";
    }
  }

  void keep_string(std::string_view value, Token& token) {
    token.begin = strings.size();
    token.length = value.size();
    strings += value;
  }

  const std::string& path_;
  std::vector<Scope> scopes_;
  std::string key_;
  std::vector<std::string> sections_;
  Token added_token_;
  bool has_content_ = false;
};

void check_byte_level_bpe(const TokenizerSax& file) {
  if (!file.has_vocab) file.fail("expected 'model' with a 'vocab'");
  // Old files name no type; only BPE has merges.
  if (file.model_type != "BPE" && !(file.model_type.empty() && file.has_merges)) {
    file.fail("expected a BPE model, got '" + shown(file.model_type) + "'");
  }
  std::vector<std::string> types = file.decoder_types;
  std::erase(types, "Sequence");
  if (types != std::vector<std::string>{"ByteLevel"}) {
    std::string got;
    for (const std::string& type : types) got += (got.empty() ? "" : ", ") + shown(type);
    file.fail("expected the decoder to be ByteLevel, got " + (got.empty() ? "none" : got));
  }
}

// Token of every id. Added tokens may repeat a token of the vocabulary under the same id.
std::vector<Token> tokens_by_id(const TokenizerSax& file) {
  std::vector<Token> all = file.vocab;
  std::unordered_map<std::string_view, int32_t> ids;
  ids.reserve(file.vocab.size() + file.added.size());
  const auto quoted = [&](const Token& token) { return "'" + shown(file.string_of(token)) + "'"; };
  for (const Token& token : file.vocab) {
    if (!ids.emplace(file.string_of(token), token.id).second) {
      file.fail("token " + quoted(token) + " appears twice");
    }
  }
  for (const Token& token : file.added) {
    const auto [known, is_new] = ids.emplace(file.string_of(token), token.id);
    if (!is_new && known->second != token.id) {
      file.fail("token " + quoted(token) + " has two ids, " + std::to_string(known->second) +
                " and " + std::to_string(token.id));
    }
    if (is_new) all.push_back(token);
  }

  std::vector<Token> by_id(all.size());
  for (const Token& token : all) {
    const auto id = static_cast<size_t>(token.id);
    if (id >= all.size()) {
      file.fail("token " + quoted(token) + ": expected the " + std::to_string(all.size()) +
                " tokens to have the ids 0 to " + std::to_string(all.size() - 1) +
                " without a hole, got id " + std::to_string(id));
    }
    if (by_id[id].id >= 0) {
      file.fail("tokens " + quoted(by_id[id]) + " and " + quoted(token) + " have the same id " +
                std::to_string(id));
    }
    by_id[id] = token;
  }
  return by_id;
}

// The characters that stand for bytes: printable Latin-1 for itself, the rest from U+0100 up in
// byte order. -1: no byte.
constexpr size_t kByteCharacters = 0x144;
constexpr std::array<int16_t, kByteCharacters> byte_of_character() {
  std::array<int16_t, kByteCharacters> bytes{};
  for (int16_t& byte : bytes) byte = -1;
  size_t next = 0x100;
  for (int16_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    bytes[printable ? static_cast<size_t>(byte) : next++] = byte;
  }
  return bytes;
}
constexpr std::array<int16_t, kByteCharacters> kByteOfCharacter = byte_of_character();

// What `token` alone decodes to. Replaces `bytes`, which is scratch.
void append_decoded(std::string_view token, std::string& bytes, std::string& out) {
  bytes.clear();
  for (std::string_view rest = token; !rest.empty();) {
    const Utf8Step step = decode_utf8(rest);
    rest.remove_prefix(static_cast<size_t>(step.length));
    const int byte =
        step.code_point < kByteCharacters ? kByteOfCharacter[step.code_point] : int16_t{-1};
    if (byte < 0) {
      out += token;
      return;
    }
    bytes += static_cast<char>(byte);
  }
  append_utf8_lossy(bytes, out);
}

}  // namespace

std::string read_tokenizer_bytes(const std::string& path) { return read_file(path, kMaxJsonBytes); }

Vocabulary parse_tokenizer_json(const std::string& path, std::string_view json) {
  TokenizerSax file(path);
  nlohmann::json::sax_parse(json.begin(), json.end(), &file);
  check_byte_level_bpe(file);

  Vocabulary vocabulary;
  vocabulary.text_offsets.push_back(0);
  vocabulary.raw_offsets.push_back(0);
  std::string scratch;
  for (const Token& token : tokens_by_id(file)) {
    const std::string_view raw = file.string_of(token);
    vocabulary.raw_tokens += raw;
    append_decoded(raw, scratch, vocabulary.texts);
    vocabulary.raw_offsets.push_back(static_cast<int64_t>(vocabulary.raw_tokens.size()));
    vocabulary.text_offsets.push_back(static_cast<int64_t>(vocabulary.texts.size()));
  }
  return vocabulary;
}

Vocabulary read_tokenizer_json(const std::string& path) {
  return parse_tokenizer_json(path, read_tokenizer_bytes(path));
}

namespace {

std::string_view slice(std::string_view bytes, const std::vector<int64_t>& offsets, int64_t id) {
  const int64_t vocab = static_cast<int64_t>(offsets.size()) - 1;
  if (id < 0 || id >= vocab) {
    throw Error(ErrorKind::contract, "vocabulary: expected an id below " + std::to_string(vocab) +
                                         ", got " + std::to_string(id));
  }
  const auto begin = static_cast<size_t>(offsets[static_cast<size_t>(id)]);
  const auto end = static_cast<size_t>(offsets[static_cast<size_t>(id) + 1]);
  return bytes.substr(begin, end - begin);
}

}  // namespace

std::string_view Vocabulary::text(int64_t id) const { return slice(texts, text_offsets, id); }

std::string_view Vocabulary::raw_token(int64_t id) const {
  return slice(raw_tokens, raw_offsets, id);
}

}  // namespace ehc::text
