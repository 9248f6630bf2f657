//! What the kernel must refuse a client.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::handshake::Welcome;
use llmd_protocol::layout::Geometry;
use llmd_protocol::limits;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl, open};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mprotect, munmap};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{ftruncate, write};

use crate::pair::{accept, next_completion, publish, say, welcome};
use crate::start_other;

fn reopen_for_writing(fd: &OwnedFd) -> nix::Result<OwnedFd> {
    open(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_str(), OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
}

fn map(fd: BorrowedFd<'_>, prot: ProtFlags) -> nix::Result<std::ptr::NonNull<std::ffi::c_void>> {
    let page = NonZeroUsize::new(4096).unwrap();
    // SAFETY: a new mapping at an address of the kernel's choice; nothing refers to it.
    unsafe { mmap(None, page, prot, MapFlags::MAP_SHARED, fd, 0) }
}

/// Every way to change `down` through this descriptor that is known to us; all must be refused.
fn attack(fd: &impl AsFd) {
    let fd = fd.as_fd();
    let refused = |what: &str, result: nix::Result<()>| {
        assert!(
            matches!(result, Err(Errno::EPERM | Errno::EACCES | Errno::EBADF | Errno::EINVAL)),
            "{what}: {result:?}"
        );
    };
    let read_write = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    refused("write", write(fd, b"x").map(drop));
    refused("shrink", ftruncate(fd, 0));
    refused("grow", ftruncate(fd, 1 << 20));
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    refused("punch a hole", fallocate(fd, hole, 0, 4096));
    refused("allocate more", fallocate(fd, FallocateFlags::empty(), 0, 1 << 20));
    refused("add a seal", fcntl(fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).map(drop));
    refused("map writable", map(fd, read_write).map(drop));
    let reading = map(fd, ProtFlags::PROT_READ).unwrap();
    // SAFETY: the page just mapped; nothing refers to it. If a change of protection succeeds the test fails.
    refused("mprotect", unsafe { mprotect(reading, 4096, read_write) });
    // SAFETY: as above.
    refused("MADV_REMOVE", unsafe { madvise(reading, 4096, MmapAdvise::MADV_REMOVE) });
    // SAFETY: the page just mapped; nothing refers to it.
    unsafe { munmap(reading, 4096) }.unwrap();
}

#[test]
fn the_client_cannot_change_what_the_daemon_writes() {
    let (mut daemon, welcome) = welcome();
    attack(&welcome.down);
    // The owner may change the mode and open it anew; the seals hold all the same.
    if let Ok(reopened) = reopen_for_writing(&welcome.down) {
        attack(&reopened);
    }
    fchmod(&welcome.down, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    attack(&reopen_for_writing(&welcome.down).unwrap());
    // Neither side can change the size of what the client writes.
    for bytes in [0, 4096, 1 << 20] {
        assert_eq!(ftruncate(&welcome.up, bytes), Err(Errno::EPERM));
    }
    // The daemon's own mapping is as writable as before, and the client sees it.
    say(&mut daemon, CompletionSlot::accepted(1, 2));
    publish(&mut daemon);
    let mut client = welcome.map().unwrap();
    assert_eq!(next_completion(&mut client), Some(CompletionSlot::accepted(1, 2)));
}

#[test]
fn another_user_cannot_change_what_the_daemon_writes() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let (listener, mut other) = start_other("other-uid");
    let _daemon = accept(&listener);
    assert!(other.succeeded());
}

/// A hole punched by the client into its own segment, its right, does not hurt the daemon's reading.
#[test]
fn a_hole_in_the_clients_memory_reads_as_zeros() {
    let (mut daemon, client) = welcome();
    let bytes = Geometry::default().up_bytes() as i64;
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&client.up, hole, 0, bytes).unwrap();
    assert_eq!(daemon.submissions.next(), Ok(None));
    assert_eq!(daemon.completions.free(), Ok(limits::COMPLETION_SLOTS));
}

/// The other process of [`another_user_cannot_change_what_the_daemon_writes`].
pub(crate) fn as_another_user(welcome: &Welcome) {
    nix::unistd::setgroups(&[]).unwrap();
    nix::unistd::setgid(nix::unistd::Gid::from_raw(65534)).unwrap();
    nix::unistd::setuid(nix::unistd::Uid::from_raw(65534)).unwrap();
    assert_eq!(reopen_for_writing(&welcome.down).unwrap_err(), Errno::EACCES);
    assert_eq!(fchmod(&welcome.down, Mode::S_IRWXU), Err(Errno::EPERM));
    attack(&welcome.down);
}
