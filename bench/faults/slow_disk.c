/* Makes positioned reads and writes of files below the folder SLOW_DISK_BELOW take as many microseconds longer as stand,
 * as text, in the file SLOW_DISK.  Other files, and what is mapped, are as quick as ever. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long delay_us(void) {
    char text[32] = {0};
    const char *path = getenv("SLOW_DISK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    return got > 0 ? atol(text) : 0;
}

static void wait_for(int file) {
    char link[64], path[PATH_MAX];
    const char *below = getenv("SLOW_DISK_BELOW");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = below ? readlink(link, path, sizeof path - 1) : -1;
    if (size < 0) return;
    path[size] = 0;
    if (strncmp(path, below, strlen(below))) return;
    long us = delay_us();
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (us > 0 && nanosleep(&left, &left)) {
    }
}

static ssize_t reads(int file, const struct iovec *into, int count, off_t at, int flags) {
    wait_for(file);
    return syscall(SYS_preadv2, file, into, (long)count, (long)at, 0L, (long)flags);
}

static ssize_t writes(int file, const struct iovec *from, int count, off_t at, int flags) {
    wait_for(file);
    return syscall(SYS_pwritev2, file, from, (long)count, (long)at, 0L, (long)flags);
}

ssize_t preadv(int file, const struct iovec *into, int count, off_t at) { return reads(file, into, count, at, 0); }
ssize_t preadv64(int file, const struct iovec *into, int count, off_t at) { return reads(file, into, count, at, 0); }
ssize_t preadv2(int file, const struct iovec *into, int count, off_t at, int flags) {
    return reads(file, into, count, at, flags);
}
ssize_t preadv64v2(int file, const struct iovec *into, int count, off_t at, int flags) {
    return reads(file, into, count, at, flags);
}
ssize_t pwritev(int file, const struct iovec *from, int count, off_t at) { return writes(file, from, count, at, 0); }
ssize_t pwritev64(int file, const struct iovec *from, int count, off_t at) { return writes(file, from, count, at, 0); }
ssize_t pwritev2(int file, const struct iovec *from, int count, off_t at, int flags) {
    return writes(file, from, count, at, flags);
}
ssize_t pwritev64v2(int file, const struct iovec *from, int count, off_t at, int flags) {
    return writes(file, from, count, at, flags);
}
