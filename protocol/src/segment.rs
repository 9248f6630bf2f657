//! Memory both sides map: memfds, sealed before any descriptor leaves the process.
//!
//! `down` is written by the daemon. A read-only descriptor alone protects nothing: its holder can open the same file
//! again for writing through /proc/self/fd. So its mode is 0400, which stops other uids, and F_SEAL_FUTURE_WRITE stops
//! everybody, while the daemon's own mapping, made before, stays writable. `up` is written by the client; the daemon maps it
//! read-only. Both are sealed against growing and shrinking, so neither side can make the other fault by truncation.
//!
//! There is no name in any file system: when the last descriptor and mapping are gone, also by kill -9, the memory is.
//!
//! Access is by whole atomic words only. Nobody forms a byte slice over shared memory, because the other process may change
//! it at any moment.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::stat::{Mode, fchmod};

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// memfd_create(2), Linux 6.3: not executable, and sealed so. libc names it only for some targets.
const MFD_NOEXEC_SEAL: libc::c_uint = 0x0008;

/// Seals that a client demands of what it maps: without them the daemon could make it fault.
const SIZE_SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// One shared mapping; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    writable: bool,
    /// The process that made it. MADV_DONTFORK keeps the mapping out of its children.
    pid: u32,
}

// SAFETY: the memory is shared with another process anyway and only touched through atomics; `start` is valid until drop.
unsafe impl Send for Mapping {}
// SAFETY: as above; all methods take &self and use atomic accesses.
unsafe impl Sync for Mapping {}

/// Makes the segment the daemon writes: its writable mapping, and a read-only descriptor for the client.
pub fn create_down(bytes: usize) -> io::Result<(Mapping, OwnedFd)> {
    let fd = create(c"llmd-down", bytes)?;
    let mapping = Mapping::new(&fd, bytes, true)?;
    fchmod(&fd, Mode::S_IRUSR)?;
    let seals = SIZE_SEALS | SealFlag::F_SEAL_FUTURE_WRITE | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let read_only = nix::fcntl::open(path.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    Ok((mapping, read_only))
}

/// Makes the segment the client writes: the daemon's read-only mapping, and the client's descriptor.
pub fn create_up(bytes: usize) -> io::Result<(Mapping, OwnedFd)> {
    let fd = create(c"llmd-up", bytes)?;
    let mapping = Mapping::new(&fd, bytes, false)?;
    // The client holds a descriptor; nobody needs to open this anew.
    fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(SIZE_SEALS | SealFlag::F_SEAL_SEAL))?;
    Ok((mapping, fd))
}

fn create(name: &std::ffi::CStr, bytes: usize) -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = match memfd_create(name, flags | MFdFlags::from_bits_retain(MFD_NOEXEC_SEAL)) {
        // Kernels before 6.3 do not know the flag.
        Err(Errno::EINVAL) => memfd_create(name, flags)?,
        other => other?,
    };
    let file = File::from(fd);
    file.set_len(bytes as u64)?;
    Ok(file.into())
}

impl Mapping {
    /// Maps a descriptor received from the daemon, after checking that it has this size for ever.
    pub fn of_received(fd: &OwnedFd, bytes: usize, writable: bool) -> io::Result<Self> {
        let seals = SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SIZE_SEALS) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the segment's size is not sealed"));
        }
        let found = nix::sys::stat::fstat(fd)?.st_size;
        if found != bytes as i64 {
            let text = format!("the segment has {found} bytes instead of {bytes}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Self::new(fd, bytes, writable)
    }

    fn new(fd: impl AsFd, bytes: usize, writable: bool) -> io::Result<Self> {
        let length = NonZeroUsize::new(bytes).ok_or(Errno::EINVAL)?;
        let read = ProtFlags::PROT_READ;
        let prot = if writable { read | ProtFlags::PROT_WRITE } else { read };
        // Populated at once: the engine thread shall not fault on a session's first tokens.
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(None, length, prot, flags, fd, 0) }?;
        let mapping = Self { start: start.cast(), bytes, writable, pid: std::process::id() };
        // A child that kept it could write to a session that is its parent's.
        // SAFETY: exactly the range just mapped; the advice changes nothing in this process.
        unsafe { madvise(start, bytes, MmapAdvise::MADV_DONTFORK) }?;
        Ok(mapping)
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// One word, Relaxed.
    pub fn load_u32(&self, offset: u32) -> u32 {
        self.u32_at(offset).load(Ordering::Relaxed)
    }

    /// One word, Relaxed.
    pub fn load_u64(&self, offset: u32) -> u64 {
        self.u64_at(offset).load(Ordering::Relaxed)
    }

    /// One word, Relaxed. The mapping must be writable.
    pub fn store_u32(&self, offset: u32, value: u32) {
        assert!(self.writable, "a store to a read-only mapping");
        self.u32_at(offset).store(value, Ordering::Relaxed);
    }

    /// One word, Relaxed. The mapping must be writable.
    pub fn store_u64(&self, offset: u32, value: u64) {
        assert!(self.writable, "a store to a read-only mapping");
        self.u64_at(offset).store(value, Ordering::Relaxed);
    }

    /// Copies `len` bytes at `offset` (a multiple of 8) to the end of `out`, each word read once.
    pub fn append_bytes(&self, offset: u32, len: u32, out: &mut Vec<u8>) {
        let words = self.words_at(offset, len.div_ceil(8) as usize);
        out.reserve(len as usize);
        let (whole, rest) = (len as usize / 8, len as usize % 8);
        for word in &words[..whole] {
            out.extend_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        if rest > 0 {
            out.extend_from_slice(&words[whole].load(Ordering::Relaxed).to_le_bytes()[..rest]);
        }
    }

    /// Writes `bytes` at `offset` (a multiple of 8), the last word filled up with zeros. The mapping must be writable.
    pub fn store_bytes(&self, offset: u32, bytes: &[u8]) {
        assert!(self.writable, "a store to a read-only mapping");
        let words = self.words_at(offset, bytes.len().div_ceil(8));
        let (whole, rest) = bytes.as_chunks::<8>();
        for (word, chunk) in words.iter().zip(whole) {
            word.store(u64::from_le_bytes(*chunk), Ordering::Relaxed);
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            words[whole.len()].store(u64::from_le_bytes(last), Ordering::Relaxed);
        }
    }

    /// The word at `offset`. Whoever stores to it must know that the mapping is writable.
    #[inline]
    pub(crate) fn u32_at(&self, offset: u32) -> &AtomicU32 {
        let offset = offset as usize;
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes, "a word outside the mapping");
        // SAFETY: inside the mapping and aligned (the start is page-aligned), valid as long as &self; all accesses of this process
        // are atomic, and an AtomicU32 can hold any bits another process may store. Loads from a read-only mapping
        // are Relaxed, which is allowed for words of this size.
        unsafe { self.start.add(offset).cast::<AtomicU32>().as_ref() }
    }

    /// The word at `offset`, as [`Self::u32_at`].
    #[inline]
    pub(crate) fn u64_at(&self, offset: u32) -> &AtomicU64 {
        &self.words_at(offset, 1)[0]
    }

    /// `count` words from `offset` on, as [`Self::u32_at`].
    #[inline]
    pub(crate) fn words_at(&self, offset: u32, count: usize) -> &[AtomicU64] {
        let offset = offset as usize;
        assert!(
            offset.is_multiple_of(8) && offset <= self.bytes && count <= (self.bytes - offset) / 8,
            "words outside the mapping"
        );
        // SAFETY: as in u32_at, for `count` words that lie inside the mapping.
        unsafe { std::slice::from_raw_parts(self.start.add(offset).cast::<AtomicU64>().as_ptr(), count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a forked child nothing is mapped here, or something else is by now.
        if std::process::id() == self.pid {
            // SAFETY: the range mmap gave us, and no reference outlives self.
            let _ = unsafe { munmap(self.start.cast(), self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_every_length_survive() {
        let (daemon, fd) = create_up(4096).unwrap();
        let client = Mapping::of_received(&fd, 4096, true).unwrap();
        for len in 0..=40u32 {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
            client.store_bytes(4096 - 40, &bytes);
            let mut copy = Vec::new();
            daemon.append_bytes(4096 - 40, len, &mut copy);
            assert_eq!(copy, bytes);
        }
    }

    #[test]
    fn a_segment_of_another_size_or_without_seals_is_refused() {
        let (_daemon, fd) = create_up(4096).unwrap();
        assert_eq!(Mapping::of_received(&fd, 8192, true).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let loose = memfd_create(c"loose", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        nix::unistd::ftruncate(&loose, 4096).unwrap();
        assert_eq!(Mapping::of_received(&loose, 4096, true).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    #[should_panic(expected = "outside the mapping")]
    fn a_word_outside_is_a_bug_of_ours() {
        let (daemon, _fd) = create_up(4096).unwrap();
        daemon.load_u32(4096);
    }
}
