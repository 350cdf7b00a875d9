// A file system that fails, or whose machine stops, at the call that a test names.
#ifndef MOE_TESTS_MOE_CHECKPOINT_FAULTY_FILES_H_
#define MOE_TESTS_MOE_CHECKPOINT_FAULTY_FILES_H_

#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <vector>

#include "moe/io/file_system.h"

namespace moe::testing {

enum class Fault : uint8_t {
  kNone,
  kError,       // the call fails with `error` and does nothing
  kShortWrite,  // a Write takes half, the next one is interrupted, then it goes on
  kDiskFull,    // a Write takes half; it and all that need room fail with ENOSPC from then on
  kStop,        // a Write takes half; from then on nothing happens any more
};

// What a power cut takes with it, of what was not flushed.
enum class Loss : uint8_t { kNothing, kBytes, kBytesAndNames };

// Thread-safe. Flushes are noted, not done: with no fault it is a fast disk.
class FaultyFiles : public FileSystem {
 public:
  FaultyFiles() : FaultyFiles("", Fault::kNone, 0) {}
  // `graveyard` is a folder beside what is written, on the same disk: what PowerCut needs.
  FaultyFiles(std::string graveyard, Fault fault, int64_t at_call, int error = EIO);
  ~FaultyFiles() override;

  int64_t calls() const { return calls_; }
  bool reached() const { return calls_ >= at_call_; }
  void Mend() { fault_ = Fault::kNone; }
  // The disk as a power cut leaves it; after the last call.
  void PowerCut(Loss loss);

  std::error_code Create(const std::string& path, int& file) override;
  std::error_code Write(int file, absl::Span<const uint8_t> bytes, size_t& written) override;
  std::error_code Flush(int file, PageCache cache) override;
  std::error_code Close(int file) override;
  std::error_code Rename(const std::string& from, const std::string& to) override;
  std::error_code Unlink(const std::string& path) override;
  std::error_code MakeFolder(const std::string& path) override;
  std::error_code RemoveFolder(const std::string& path) override;
  std::error_code FlushFolder(const std::string& path) override;
  std::error_code List(const std::string& path, std::vector<std::string>& names) override;

 private:
  enum class Kind : uint8_t { kCreate, kRename, kUnlink, kMakeFolder, kRemoveFolder };
  struct Change {
    Kind kind;
    std::string path;   // before the change
    std::string to;     // of a Rename
    std::string saved;  // where the file is kept that it took away; empty: none
    bool flushed = false;
  };
  struct Written {
    int file;  // a descriptor of our own
    int64_t flushed_bytes = 0;
  };

  // Counts a call: what it is to fail with. `room`: whether it needs room on the disk.
  std::error_code Next(bool room);
  std::string Keep(const std::string& path);
  void Undo(const Change& change);

  std::mutex mu_;
  const std::string graveyard_;
  Fault fault_;
  const int64_t at_call_;
  const int error_;
  int64_t calls_ = 0;
  int64_t kept_ = 0;
  std::vector<Change> changes_;
  std::map<int, Written> open_;  // by descriptor
  std::vector<Written> closed_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_CHECKPOINT_FAULTY_FILES_H_
