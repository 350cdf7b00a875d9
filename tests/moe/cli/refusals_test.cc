// Every row of refusals.txt: the program, called as in the row, ends with the row's exit code and
// one line on standard error that contains the row's text; it writes nothing to standard output,
// and no file is created, changed or removed. Each call is a forked process.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "moe/cli/base/command.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;

// Words separated by blanks; within '...' a blank is part of the word, and '' is an empty word.
Strings WordsOf(absl::string_view line) {
  Strings words;
  bool quoted = false, in_word = false;
  for (const char c : line) {
    if (c == '\'') {
      quoted = !quoted;
    } else if (c == ' ' && !quoted) {
      in_word = false;
      continue;
    }
    if (!in_word) words.emplace_back();
    in_word = true;
    if (c != '\'') words.back().push_back(c);
  }
  return words;
}

struct Row {
  int code = 0;
  Strings environment, args;
  Strings parts;       // parts of the line on standard error
  bool whole = false;  // the only part is the whole line after "moe COMMAND: "
};

// `begin` precedes the row's own arguments. Writes the configuration file of a row with "<<<".
Row RowOf(const std::string& line, const Strings& begin) {
  Row row;
  std::string call = line, text;
  for (const std::string arrow : {" => ", " == "}) {
    const size_t at = line.find(arrow);
    if (at == std::string::npos || at > call.size()) continue;
    call = line.substr(0, at);
    text = line.substr(at + arrow.size());
    row.whole = arrow == " == ";
  }
  const std::pair<std::string, std::string> split =
      absl::StrSplit(call, absl::MaxSplits(" <<< ", 1));
  Strings words = WordsOf(split.first);
  EXPECT_TRUE(!words.empty() && absl::SimpleAtoi(words[0], &row.code)) << line;
  row.args = begin;
  for (size_t i = 1; i < words.size(); ++i) {
    const bool assigns = row.args == begin && words[i].find('=') < words[i].find('-');
    (assigns ? row.environment : row.args).push_back(words[i]);
  }
  if (!split.second.empty()) {
    std::ofstream("c.json") << split.second;
    row.args.insert(row.args.end(), {"--config", "c.json"});
  }
  row.parts = row.whole ? Strings{text} : Strings(absl::StrSplit(text, " && "));
  return row;
}

[[noreturn]] void Call(const Row& row) {
  const char* const streams[] = {"/dev/null", "../stdout", "../stderr"};
  for (int stream = 0; stream < 3; ++stream) {
    const int file = ::open(streams[stream], O_RDWR | O_CREAT | O_TRUNC, 0600);
    ::dup2(file, stream);
    ::close(file);
  }
  // No outside setting has an effect.
  Strings names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    names.emplace_back(*entry, absl::string_view(*entry).find('='));
  }
  for (const std::string& name : names) {
    for (const char* const prefix : {"MOE_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "RANK",
                                     "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_"}) {
      if (absl::StartsWith(name, prefix)) ::unsetenv(name.c_str());
    }
  }
  for (const std::string& entry : row.environment) {
    const size_t end = entry.find('=');
    ::setenv(entry.substr(0, end).c_str(), entry.substr(end + 1).c_str(), 1);
  }
  Strings args = row.args;
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  ::alarm(120);
  std::exit(RunProgram(static_cast<int>(argv.size()), argv.data()));
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The files of this folder: paths, with size and time.
std::map<std::string, std::string> Here() {
  std::map<std::string, std::string> here;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(".")) {
    const std::string path = entry.path().string();
    here[path] = entry.is_regular_file()
                     ? absl::StrCat(entry.file_size(), " ",
                                    entry.last_write_time().time_since_epoch().count())
                     : "";
  }
  return here;
}

// "", or what is wrong.
std::string Check(const Row& row) {
  const auto before = Here();
  const pid_t child = ::fork();
  if (child == 0) Call(row);
  int status = 0;
  ::waitpid(child, &status, 0);
  const std::string err = ReadAll("../stderr");
  if (!WIFEXITED(status) || WEXITSTATUS(status) != row.code) {
    return absl::StrCat("status ", status, ": ", err);
  }
  if (row.code == 0) return "";
  if (err.find('\n') + 1 != err.size()) return absl::StrCat("not one line: ", err);
  if (!ReadAll("../stdout").empty()) return "wrote to standard output";
  if (Here() != before) return "changed files";
  if (row.whole) {
    const std::string line = absl::StrCat("moe ", row.args[1], ": ", row.parts[0], "\n");
    return err == line ? "" : absl::StrCat("another line: ", err);
  }
  for (const std::string& part : row.parts) {
    if (!absl::StrContains(err, part)) return absl::StrCat("no '", part, "' in: ", err);
  }
  return "";
}

TEST(RefusalsTest, EveryRowIsRefusedAsItSays) {
  char folder[] = "/tmp/refusals_XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  fs::create_directory(absl::StrCat(folder, "/work"));
  fs::current_path(absl::StrCat(folder, "/work"));
  ::setenv("NO_COLOR", "1", 1);
  std::ifstream table(MOE_REFUSALS);
  ASSERT_TRUE(table.is_open());
  Strings begin = {"moe"};
  int number = 0, rows = 0;
  for (std::string line; std::getline(table, line);) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    line = absl::StrReplaceAll(line, {{"$golden", MOE_GOLDEN_DATA}});
    if (absl::StartsWith(line, "$ ")) {
      ASSERT_EQ(std::system(line.substr(2).c_str()), 0) << number << ": " << line;
    } else if (absl::StartsWith(line, "moe")) {
      begin = WordsOf(line);
      ASSERT_EQ(begin.back(), "...") << number << ": " << line;
      begin.pop_back();
    } else {
      const std::string problem = Check(RowOf(line, begin));
      EXPECT_TRUE(problem.empty()) << "refusals.txt:" << number << ": " << line << "\n" << problem;
      ++rows;
    }
  }
  EXPECT_GT(rows, 200);
  fs::current_path("/");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace moe::cli
