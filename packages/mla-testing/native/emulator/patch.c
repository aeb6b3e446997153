// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include "patch.h"

#include <cpuid.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stub.h"

void amx_entry_move(void);
void amx_entry_dot_xsave(void);
void amx_entry_dot_avx512(void);

// One byte that raises #UD in 64-bit mode (PUSH ES elsewhere): what stands at a site while its other bytes change.
enum { TRAP_BYTE = 0x06, JUMP_BYTE = 0xe9 };

static atomic_int lock;

void amx_lock(void) {
    while (atomic_exchange_explicit(&lock, 1, memory_order_acquire)) sched_yield();
}

void amx_unlock(void) { atomic_store_explicit(&lock, 0, memory_order_release); }

// ---- Writing code -------------------------------------------------------------------------------------------------
//
// Through /proc/self/mem, which writes private read-only pages without a window in which they are writable; where that
// is closed, through mprotect.

static int memory_file = -1;
int amx_patch_by_mprotect;

static int open_memory(void) {
    if (amx_patch_by_mprotect) return -1;
    if (memory_file < 0) memory_file = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    return memory_file;
}

// protection: what the pages have, and keep.
static int write_code(uint8_t *to, const void *bytes, size_t n, int protection) {
    const int file = open_memory();
    if (file >= 0 && pwrite(file, bytes, n, (off_t)(uintptr_t)to) == (ssize_t)n) return 1;
    const uintptr_t page = (uintptr_t)to & -4096, end = ((uintptr_t)to + n + 4095) & -4096;
    if (!(protection & PROT_WRITE) && mprotect((void *)page, end - page, protection | PROT_WRITE)) return 0;
    for (size_t i = 0; i < n; ++i) ((volatile uint8_t *)to)[i] = ((const uint8_t *)bytes)[i];
    if (!(protection & PROT_WRITE)) mprotect((void *)page, end - page, protection);
    return 1;
}

static int read_code(const uint8_t *from, void *bytes, size_t n) {
    const int file = open_memory();
    if (file >= 0) return pread(file, bytes, n, (off_t)(uintptr_t)from) == (ssize_t)n;
    memcpy(bytes, from, n);
    return 1;
}

// Lets every running thread of the process forget what it has fetched ahead.
static void serialize_all_cores(void) {
    if (!syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0)) return;
    syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0);
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0);
}

// Threads may be running into the five bytes. The first byte traps from the first write to the last, and the handler
// of such a trap waits for the lock and then finds the site in the table: no thread ever executes a mixture.
static int rewrite(uint8_t *address, const uint8_t bytes[AMX_MIN_LENGTH], int protection) {
    const uint8_t trap = TRAP_BYTE;
    uint8_t before;
    if (!read_code(address, &before, 1) || !write_code(address, &trap, 1, protection)) return 0;
    serialize_all_cores();
    if (!write_code(address + 1, bytes + 1, AMX_MIN_LENGTH - 1, protection)) {
        write_code(address, &before, 1, protection);
        return 0;
    }
    serialize_all_cores();
    return write_code(address, bytes, 1, protection);
}

// ---- Memory for stubs within reach of a jump ----------------------------------------------------------------------

enum { CHUNK = 64 << 10, CHUNKS = 1024 };
static struct chunk {
    uint8_t *start;
    uint32_t used;
} chunks[CHUNKS];
static _Atomic uint32_t chunk_count;

static int reachable(const uint8_t *a, const uint8_t *b) {
    const int64_t distance = (int64_t)((uintptr_t)a - (uintptr_t)b);
    return distance > -0x7ff00000 && distance < 0x7ff00000;
}

// What /proc/self/maps says about a site.
struct surroundings {
    int shared;      // with other processes, to whom the stub would mean nothing
    int protection;  // of its pages
    uint8_t *place;  // where a chunk fits, or 0
};

// A chunk is put into the gap with the point nearest to the site; away from the gap's ends, where the heap of the
// program below or mappings to come want to grow, and never below the stack.
static int survey(const uint8_t *site, struct surroundings *found) {
    enum { MARGIN = 1 << 20 };
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) return 0;
    char buffer[4096];
    ssize_t have;
    uintptr_t number = 0, start = 0, previous_end = 1 << 16, best = 0;
    const uintptr_t want = (uintptr_t)site & -4096;
    uint64_t best_distance = ~0ull;
    enum { START, END, REST } field = START;
    int stack = 0, permission = 0, known = 0;
    // The site is being executed, whatever the list says (QEMU's user mode leaves the x out).
    *found = (struct surroundings){.protection = PROT_READ | PROT_EXEC};
    while ((have = read(maps, buffer, sizeof buffer)) > 0) {
        for (ssize_t i = 0; i < have; ++i) {
            const char c = buffer[i];
            if (field == REST) {
                if (++permission <= 4 && start <= (uintptr_t)site && (uintptr_t)site < number) {
                    known = 1;
                    if (c == 's') found->shared = 1;
                    if (c == 'w') found->protection |= PROT_WRITE;
                }
                if (c == '[') stack = 1;
                if (stack > 0 && stack < 6) stack = c == "[stack"[stack - 1] ? stack + 1 : 0;
                if (c != '\n') continue;
                if (stack < 6 && start > previous_end + 2 * MARGIN + CHUNK) {
                    const uintptr_t low = (previous_end + MARGIN + 4095) & -4096, high = start - MARGIN - CHUNK;
                    const uintptr_t place = want < low ? low : want > high ? high : want;
                    const uint64_t distance = place > want ? place - want : want - place;
                    if (distance < best_distance) best = place, best_distance = distance;
                }
                previous_end = number;
                number = 0;
                stack = permission = 0;
                field = START;
            } else if (c == '-') {
                start = number;
                number = 0;
                field = END;
            } else if (c == ' ') {
                field = REST;
            } else {
                number = number << 4 | (uintptr_t)(c <= '9' ? c - '0' : c - 'a' + 10);
            }
        }
    }
    close(maps);
    found->place = best && reachable((uint8_t *)best, site) ? (uint8_t *)best : 0;
    return known;
}

static uint8_t *new_stub(const uint8_t *site, struct surroundings *around) {
    for (uint32_t i = 0; i < chunk_count; ++i)
        if (chunks[i].used + STUB_SIZE <= CHUNK && reachable(chunks[i].start, site)) {
            chunks[i].used += STUB_SIZE;
            return chunks[i].start + chunks[i].used - STUB_SIZE;
        }
    if (chunk_count == CHUNKS) return 0;
    for (int attempt = 0; attempt < 8; ++attempt) {
        uint8_t *place = around->place;
        if (!place) return 0;
        void *got = mmap(place, CHUNK, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (got != place) {  // another thread was faster, or an old kernel took the place for a hint
            if (got != MAP_FAILED) munmap(got, CHUNK);
            if (!survey(site, around)) return 0;
            continue;
        }
        chunks[chunk_count] = (struct chunk){place, STUB_SIZE};
        atomic_fetch_add(&chunk_count, 1);
        return place;
    }
    return 0;
}

// ---- The table ----------------------------------------------------------------------------------------------------

enum { SLOTS = 1 << 16, SITES = 3 * (SLOTS / 4) };
static uint32_t slots[SLOTS];  // index of a site, plus one
static struct amx_site *sites;
static uint32_t site_count;

static uint32_t *slot_of(const uint8_t *address) {
    uint64_t h = (uintptr_t)address * 0x9e3779b97f4a7c15ull >> 48;
    for (;; h = (h + 1) % SLOTS)
        if (!slots[h] || sites[slots[h] - 1].address == address) return &slots[h];
}

struct amx_site *amx_find_site(const uint8_t *address) {
    if (!sites) return 0;
    const uint32_t index = *slot_of(address);
    if (!index) return 0;
    struct amx_site *site = &sites[index - 1];
    // Code may have been unloaded and other code put in its place.
    return site->patched && (address[0] == JUMP_BYTE || address[0] == TRAP_BYTE) ? site : 0;
}

struct amx_site *amx_faulting_site(const uint8_t *rip) {
    for (uint32_t i = 0; i < chunk_count; ++i) {
        const uint64_t at = rip - chunks[i].start;
        if (at < CHUNK && at % STUB_SIZE == STUB_UD2) {
            struct amx_site *site;
            memcpy(&site, rip - STUB_UD2 + STUB_SITE, sizeof site);
            return site;
        }
    }
    return 0;
}

static void *entry_for(unsigned op) {
    if (!amx_is_dot(op)) return amx_entry_move;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;  // nothing to save vectors with
    return __builtin_cpu_supports("avx512bw") ? amx_entry_dot_avx512 : amx_entry_dot_xsave;
}

static void put32(uint8_t *to, int64_t value) {
    const int32_t v = (int32_t)value;
    memcpy(to, &v, 4);
}

static int write_stub(struct amx_site *site, struct surroundings *around) {
    static const uint8_t step_down[] = {0x48, 0x8d, 0xa4, 0x24, 0x80, 0xff, 0xff, 0xff};
    static const uint8_t step_up[] = {0x48, 0x8d, 0xa4, 0x24, 0x80, 0x00, 0x00, 0x00};
    void *entry = entry_for(site->insn.op);
    uint8_t *stub = entry ? new_stub(site->address, around) : 0;
    if (!stub) return 0;
    site->stub = stub;
    uint8_t code[STUB_SIZE] = {0};
    memcpy(code, step_down, sizeof step_down);
    code[8] = 0xff, code[9] = 0x15;
    put32(code + 10, STUB_ENTRY - STUB_RETURN);
    memcpy(code + STUB_RETURN, step_up, sizeof step_up);
    code[22] = JUMP_BYTE;
    put32(code + 23, (site->address + site->insn.length) - (stub + STUB_FAULT));
    memcpy(code + STUB_FAULT, step_up, sizeof step_up);
    code[STUB_UD2] = 0x0f, code[STUB_UD2 + 1] = 0x0b;
    memcpy(code + STUB_SITE, &site, sizeof site);
    memcpy(code + STUB_ENTRY, &entry, sizeof entry);
    return write_code(stub, code, sizeof code, PROT_READ | PROT_EXEC);
}

static void jump_of(const struct amx_site *site, uint8_t jump[AMX_MIN_LENGTH]) {
    jump[0] = JUMP_BYTE;
    put32(jump + 1, site->stub - (site->address + AMX_MIN_LENGTH));
}

static int rewrite_into_jump(const struct amx_site *site, int protection) {
    uint8_t jump[AMX_MIN_LENGTH];
    jump_of(site, jump);
    return rewrite(site->address, jump, protection);
}

int amx_patch(uint8_t *address, const struct amx_insn *insn) {
    if (!sites) {
        void *got = mmap(0, SITES * sizeof *sites, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (got == MAP_FAILED) return 0;
        sites = got;
    }
    if (site_count == SITES) return 0;
    uint32_t *slot = slot_of(address);
    if (*slot && sites[*slot - 1].refused) return 0;

    // Records and stubs are written once and never again, as a thread may be on its way through them.
    struct amx_site *site = &sites[site_count];
    *site = (struct amx_site){.address = address, .insn = *insn};
    memcpy(site->original, address, AMX_MIN_LENGTH);
    *slot = ++site_count;
    struct surroundings around;
    site->patched = survey(address, &around) && !around.shared && write_stub(site, &around) &&
                    rewrite_into_jump(site, around.protection);
    site->refused = !site->patched;
    return site->patched;
}

void amx_unpatch_all(void) {
    for (uint32_t i = 0; i < site_count; ++i) {
        struct amx_site *site = &sites[i];
        if (!site->patched) continue;
        uint8_t now[AMX_MIN_LENGTH], jump[AMX_MIN_LENGTH];
        jump_of(site, jump);
        struct surroundings around;
        if (survey(site->address, &around) && read_code(site->address, now, sizeof now) &&
            !memcmp(now, jump, sizeof jump)) {
            rewrite(site->address, site->original, around.protection);
        }
        site->patched = 0;
    }
}

void amx_patch_forked(void) {
    // The inherited file is the parent's memory.
    if (memory_file >= 0) close(memory_file);
    memory_file = -1;
    atomic_store(&lock, 0);
}
