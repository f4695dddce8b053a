/* Preloaded into a process: its n-th change of a folder fails as on a full disk, or kills it.

Changes are writes, flushes, new files, new folders, renamings and removals; those of forked processes count, too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct { int count, at, kills; } *state;
static char folder[4096];

__attribute__((constructor)) static void begin(void) {
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* From now on change number `at`, counted from 1, and with kills = 0 all that follow, fail; 0: count only. */
void faults_arm(const char *in, int at, int kills) {
    strncpy(folder, in, sizeof folder - 1);
    state->count = 0, state->at = at, state->kills = kills;
}

int faults_count(void) { return state->count; }

static int is_ours(const char *path) { return folder[0] && !strncmp(path, folder, strlen(folder)); }

static int fails(const char *path) {
    if (!is_ours(path)) return 0;
    int number = __sync_add_and_fetch(&state->count, 1);
    if (!state->at || number < state->at) return 0;
    if (state->kills && number == state->at) kill(getpid(), SIGKILL);
    errno = ENOSPC;
    return !state->kills;
}

static int fd_fails(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) { return fd_fails(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fd_fails(fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
int fsync(int fd) { return fd_fails(fd) ? -1 : REAL(fsync)(fd); }
int rename(const char *from, const char *to) { return fails(to) ? -1 : REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }
/* A full disk lets files be removed. */
int unlink(const char *path) { return state->kills && fails(path) ? -1 : REAL(unlink)(path); }

static int opens(const char *path, int flags) { return (flags & O_CREAT) && fails(path); }

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opens(path, flags) ? -1 : REAL(open64)(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return opens(path, flags) ? -1 : REAL(open)(path, flags, mode);
}
