/* Makes a program's file system fail, hang or be elsewhere, and its memory end: a library for
 * LD_PRELOAD.
 *
 *   FAULT_UNDER      folder, as the program names it; calls on what is in it count
 *   FAULT_NAMES      text that their paths have, too
 *   FAULT_CALLS      names of calls that count, as ",open,write,"; none: all
 *   FAULT_AT         the one of these calls that is met, from 1
 *   FAULT_KIND       number of the errno that one call fails with; or "short", a write takes half;
 *                    "kill", SIGKILL; "hang", the call does not return; "elsewhere", from that call
 *                    on the folder is another one
 *   FAULT_ELSEWHERE  that folder
 *   FAULT_RANK       the process of this rank alone, by OMPI_COMM_WORLD_RANK or PMI_RANK
 *   FAULT_COUNT      file that is appended to at exit: the number of calls, or allocations
 *   FAULT_MET        file that is made when the fault is met
 *   FAULT_MALLOC     five allocations of the C library fail, from this one on, from 1
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { kMaxFiles = 4096 };
static const char *under, *names, *calls, *elsewhere, *met_path;
static size_t under_length;
static long at;
static enum { kNone, kError, kShort, kKill, kHang, kElsewhere } kind;
static int error_number;
static atomic_long count, allocations;
static long first_failing;
static atomic_char inside[kMaxFiles]; /* by descriptor: opened under the folder */
static _Thread_local int is_short;    /* this thread's last call is the one to be cut */

static const char* Variable(const char* name) {
  const char* text = getenv(name);
  return text != NULL ? text : "";
}

__attribute__((constructor)) static void Begin(void) {
  const char* rank = getenv("OMPI_COMM_WORLD_RANK");
  if (rank == NULL) rank = Variable("PMI_RANK");
  const char* wanted = Variable("FAULT_RANK");
  if (*wanted != 0 && strcmp(rank, wanted) != 0) return;
  first_failing = atol(Variable("FAULT_MALLOC"));
  under = Variable("FAULT_UNDER");
  under_length = strlen(under);
  names = Variable("FAULT_NAMES");
  calls = Variable("FAULT_CALLS");
  elsewhere = Variable("FAULT_ELSEWHERE");
  met_path = Variable("FAULT_MET");
  at = atol(Variable("FAULT_AT"));
  const char* text = Variable("FAULT_KIND");
  error_number = atoi(text);
  kind = error_number > 0                  ? kError
         : strcmp(text, "short") == 0     ? kShort
         : strcmp(text, "kill") == 0      ? kKill
         : strcmp(text, "hang") == 0      ? kHang
         : strcmp(text, "elsewhere") == 0 ? kElsewhere
                                          : kNone;
}

__attribute__((destructor)) static void End(void) {
  const char* path = Variable("FAULT_COUNT");
  if ((under_length == 0 && first_failing == 0) || *path == 0) return;
  char line[32];
  const long met = first_failing > 0 ? atomic_load(&allocations) : atomic_load(&count);
  const int length = snprintf(line, sizeof(line), "%ld\n", met);
  const int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file < 0) return;
  (void)!syscall(SYS_write, file, line, (size_t)length);
  syscall(SYS_close, file);
}

static void Met(void) {
  if (*met_path == 0) return;
  syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, met_path, O_WRONLY | O_CREAT, 0600));
}

static int Under(const char* path) {
  return under_length > 0 && path != NULL && strncmp(path, under, under_length) == 0 &&
         (path[under_length] == '/' || path[under_length] == 0) && strstr(path, names) != NULL;
}

/* Counts a call; whether it is to fail, with errno set. */
static int Fails(const char* name) {
  char quoted[24];
  snprintf(quoted, sizeof(quoted), ",%s,", name);
  if (*calls != 0 && strstr(calls, quoted) == NULL) return 0;
  is_short = 0;
  if (atomic_fetch_add(&count, 1) + 1 != at || kind == kNone) return 0;
  if (kind == kShort) { /* write() does the rest */
    is_short = 1;
    return 0;
  }
  Met();
  if (kind == kKill) raise(SIGKILL);
  while (kind == kHang) pause();
  errno = error_number;
  return kind == kError;
}
static int FailsOn(const char* name, const char* path) { return Under(path) && Fails(name); }
static int FailsOnFile(const char* name, int file) {
  return file >= 0 && file < kMaxFiles && inside[file] && Fails(name);
}

/* Where `path` lies now. */
static const char* Now(const char* path, char* buffer) {
  if (kind != kElsewhere || !Under(path) || atomic_load(&count) < at) return path;
  snprintf(buffer, PATH_MAX, "%s%s", elsewhere, path + under_length);
  return buffer;
}

/* The next library's function of this name. */
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define NOW(path) Now(path, (char[PATH_MAX]){0})

static int Opened(int file, const char* path) {
  if (file >= 0 && file < kMaxFiles) inside[file] = (char)Under(path);
  return file;
}

#define DEFINE_OPEN(name)                                            \
  int name(const char* path, int flags, ...) {                       \
    va_list list;                                                    \
    va_start(list, flags);                                           \
    const mode_t mode = (flags & O_CREAT) ? va_arg(list, mode_t) : 0; \
    va_end(list);                                                    \
    if (FailsOn("open", path)) return -1;                            \
    return Opened(NEXT(name)(NOW(path), flags, mode), path);         \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_FOPEN(name)                        \
  FILE* name(const char* path, const char* mode) { \
    if (FailsOn("open", path)) return NULL;       \
    FILE* file = NEXT(name)(NOW(path), mode);     \
    if (file != NULL) Opened(fileno(file), path); \
    return file;                                  \
  }
DEFINE_FOPEN(fopen)
DEFINE_FOPEN(fopen64)

size_t fread(void* to, size_t size, size_t number, FILE* file) {
  if (!FailsOnFile("read", fileno(file))) return NEXT(fread)(to, size, number, file);
  file->_flags |= 0x20; /* ferror() */
  return 0;
}
ssize_t read(int file, void* to, size_t size) {
  return FailsOnFile("read", file) ? -1 : NEXT(read)(file, to, size);
}
#define DEFINE_TRUNCATE(name, offset)                                        \
  int name(int file, offset size) {                                          \
    return FailsOnFile("ftruncate", file) ? -1 : NEXT(name)(file, size);     \
  }
DEFINE_TRUNCATE(ftruncate, off_t)
DEFINE_TRUNCATE(ftruncate64, off64_t)

ssize_t write(int file, const void* bytes, size_t size) {
  is_short = 0;
  if (FailsOnFile("write", file)) return -1;
  if (is_short && size > 1) {
    Met();
    size /= 2;
  }
  return NEXT(write)(file, bytes, size);
}
int fsync(int file) { return FailsOnFile("fsync", file) ? -1 : NEXT(fsync)(file); }
int close(int file) {
  const int fails = FailsOnFile("close", file);
  const int error = errno;
  if (file >= 0 && file < kMaxFiles) inside[file] = 0;
  const int closed = NEXT(close)(file);
  if (fails) errno = error;
  return fails ? -1 : closed;
}
#define DEFINE_MMAP(name)                                                            \
  void* name(void* to, size_t size, int protection, int flags, int file, off_t from) { \
    if (FailsOnFile("mmap", file)) return MAP_FAILED;                                \
    return NEXT(name)(to, size, protection, flags, file, from);                      \
  }
DEFINE_MMAP(mmap)
DEFINE_MMAP(mmap64)

int rename(const char* from, const char* to) {
  return FailsOn("rename", from) ? -1 : NEXT(rename)(NOW(from), NOW(to));
}
int unlink(const char* path) { return FailsOn("unlink", path) ? -1 : NEXT(unlink)(NOW(path)); }
int rmdir(const char* path) { return FailsOn("rmdir", path) ? -1 : NEXT(rmdir)(NOW(path)); }
int mkdir(const char* path, mode_t mode) {
  return FailsOn("mkdir", path) ? -1 : NEXT(mkdir)(NOW(path), mode);
}
DIR* opendir(const char* path) {
  return FailsOn("opendir", path) ? NULL : NEXT(opendir)(NOW(path));
}
int access(const char* path, int mode) { return NEXT(access)(NOW(path), mode); }

#define DEFINE_STAT(name, type)                       \
  int name(const char* path, struct type* facts) {    \
    return FailsOn("stat", path) ? -1 : NEXT(name)(NOW(path), facts); \
  }
DEFINE_STAT(stat, stat)
DEFINE_STAT(stat64, stat64)
DEFINE_STAT(lstat, stat)
DEFINE_STAT(lstat64, stat64)
DEFINE_STAT(statvfs, statvfs)
DEFINE_STAT(statvfs64, statvfs64)

/* Some in a row: what catches the exception of the first may need memory itself. */
extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
static int NoMemory(void) {
  if (first_failing == 0) return 0;
  const long n = atomic_fetch_add(&allocations, 1) + 1;
  if (n < first_failing || n >= first_failing + 5) return 0;
  errno = ENOMEM;
  return 1;
}
void* malloc(size_t size) { return NoMemory() ? NULL : __libc_malloc(size); }
void* calloc(size_t number, size_t size) { return NoMemory() ? NULL : __libc_calloc(number, size); }
void* realloc(void* at, size_t size) { return NoMemory() ? NULL : __libc_realloc(at, size); }
