//! The rings between two processes, and against a client that lies.
//!
//! Where a second process is needed the test binary starts itself again: `child` is not a test but the other process.

use std::io::Write;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llmd_client::{Client, Error, Event, GenerateRequest};
use llmd_protocol::completion::{Completion, CompletionSlot};
use llmd_protocol::handshake::{
    self, ConnectError, HELLO_BYTES, Handshake, Hello, Progress, Refusal, Welcome,
};
use llmd_protocol::layout::{Geometry, SubmissionSlot, up};
use llmd_protocol::limits;
use llmd_protocol::message::{FinishReason, Reject, Usage};
use llmd_protocol::segment::Mapping;
use llmd_protocol::session::{
    ClientSession, CompletionDoorbell, DaemonSession, Submission, Violation,
};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl, open};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mprotect, munmap};
use nix::sys::signal::{Signal, raise};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{ftruncate, write};

const SECONDS_5: Duration = Duration::from_secs(5);

// ---- both ends of a session ----------------------------------------------------------------------------------------

/// A session whose client has not mapped its memory yet.
fn welcome_on(ours: UnixStream, theirs: UnixStream) -> (DaemonSession, Welcome) {
    let mut handshake = Handshake::new(ours).unwrap();
    handshake::send_hello(&theirs, Hello::default()).unwrap();
    assert!(matches!(handshake.readable(), Progress::Hello(_)));
    let daemon = handshake.welcome(7, 1).unwrap();
    (
        daemon,
        handshake::receive_welcome(theirs, SECONDS_5).unwrap(),
    )
}

fn welcome() -> (DaemonSession, Welcome) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    welcome_on(ours, theirs)
}

fn session() -> (DaemonSession, ClientSession) {
    let (daemon, client) = welcome();
    (daemon, client.map().unwrap())
}

/// A session with the client's memory mapped by hand, to store into it what no honest client would.
fn lying_session() -> (DaemonSession, Mapping, UnixStream) {
    let (daemon, client) = welcome();
    let up = Mapping::of_received(&client.up, Geometry::default().up_bytes(), true).unwrap();
    (daemon, up, client.stream)
}

/// Waits until a handshake on `listener` is through.
fn accept(listener: &UnixListener) -> DaemonSession {
    let mut handshake = Handshake::new(listener.accept().unwrap().0).unwrap();
    while handshake.readable() == Progress::Pending {
        thread::sleep(Duration::from_micros(100));
    }
    handshake.welcome(7, 1).unwrap()
}

/// The next submission; sleeps by the doorbell as the daemon does. None when the client is gone.
fn next_submission(daemon: &mut DaemonSession) -> Option<Submission> {
    loop {
        if let Some(submission) = daemon.submissions.next().unwrap() {
            return Some(submission);
        }
        if daemon.submissions.arm_wake().unwrap() {
            let drained = daemon.socket.wait(Some(SECONDS_5)).unwrap();
            assert!(
                drained.hung_up || drained.doorbells > 0,
                "a wake-up of the daemon was lost"
            );
            daemon
                .submissions
                .note_doorbells(drained.doorbells)
                .unwrap();
            if drained.hung_up && daemon.submissions.arm_wake().unwrap() {
                return None;
            }
        }
    }
}

/// The next completion; sleeps by the doorbell as a client does. None when the daemon is gone.
fn next_completion(client: &mut ClientSession) -> Option<CompletionSlot> {
    loop {
        if let Some(slot) = client.completions.pop().unwrap() {
            client.completions.release();
            return Some(slot);
        }
        if client.completions.arm().unwrap() {
            let drained = client.socket.wait(Some(SECONDS_5)).unwrap();
            assert!(
                drained.hung_up || drained.doorbells > 0,
                "a wake-up of the client was lost"
            );
            if drained.hung_up && client.completions.arm().unwrap() {
                return None;
            }
        }
    }
}

/// Publishes one slot; waits for room.
fn say(daemon: &mut DaemonSession, slot: CompletionSlot) {
    let begun = Instant::now();
    while daemon.completions.push(slot).is_err() {
        publish(daemon);
        if daemon.completions.free().unwrap() == 0 {
            assert!(begun.elapsed() < SECONDS_5, "the client stopped reading");
            thread::yield_now();
        }
    }
}

fn publish(daemon: &mut DaemonSession) {
    if let Some(published) = daemon.completions.publish() {
        CompletionDoorbell::fence();
        if daemon.doorbell.needs_wake(published) {
            daemon.doorbell.ring();
        }
    }
}

/// Sends a whole request; waits for room.
fn ask(client: &mut ClientSession, id: u32, payload: &[u8]) {
    let (mut sent, begun) = (0, Instant::now());
    while sent < payload.len() {
        sent = client.submissions.submit(id, payload, sent).unwrap();
        assert!(begun.elapsed() < SECONDS_5, "the daemon stopped reading");
    }
}

/// A sequence of numbers that any process can make again: splitmix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// What request `id` says: mostly short, now and then larger than the arena.
fn payload_of(id: u32) -> Vec<u8> {
    let mut numbers = Numbers(id.into());
    let len = match numbers.next() % 64 {
        0 => 70_000 + numbers.next() % 100_000,
        1..8 => 1 + numbers.next() % 20_000,
        _ => 1 + numbers.next() % 500,
    };
    (0..len)
        .map(|i| (i as u8).wrapping_mul(id as u8) ^ (i >> 8) as u8 ^ id as u8)
        .collect()
}

/// The answer to it: so many slots, each with a number of its own.
fn slots_of(id: u32) -> u32 {
    (Numbers(!u64::from(id)).next() % 400) as u32
}

fn id_of_slot(id: u32, index: u32) -> u32 {
    Numbers(u64::from(id) << 32 | u64::from(index)).next() as u32
}

// ---- the other process ---------------------------------------------------------------------------------------------

/// A listening socket, and this binary started again as `role` with the way to it.
struct Other {
    path: PathBuf,
    child: Child,
}

fn start_other(role: &str) -> (UnixListener, Other) {
    let path = std::env::temp_dir().join(format!("llmd-rings-{}-{role}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("LLMD_RINGS_ROLE", role)
        .env("LLMD_RINGS_SOCKET", &path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (listener, Other { path, child })
}

impl Other {
    fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Not a test: what the second process does. Passes at once when nobody started it as such.
#[test]
fn child() {
    let Ok(role) = std::env::var("LLMD_RINGS_ROLE") else {
        return;
    };
    let path = PathBuf::from(std::env::var("LLMD_RINGS_SOCKET").unwrap());
    let connect = || handshake::connect(&path, Hello::default(), SECONDS_5).unwrap();
    match role.as_str() {
        "oracle" => ask_and_check(&mut connect().map().unwrap()),
        "other-uid" => {
            let welcome = connect();
            nix::unistd::setgroups(&[]).unwrap();
            nix::unistd::setgid(nix::unistd::Gid::from_raw(65534)).unwrap();
            nix::unistd::setuid(nix::unistd::Uid::from_raw(65534)).unwrap();
            assert_eq!(
                reopen_for_writing(&welcome.down).unwrap_err(),
                Errno::EACCES
            );
            assert_eq!(fchmod(&welcome.down, Mode::S_IRWXU), Err(Errno::EPERM));
            attack(&welcome.down);
        }
        "reclaim" => reclaim(&path),
        "victim" => {
            let _session = connect().map().unwrap();
            thread::sleep(Duration::from_secs(60));
        }
        other => panic!("no role {other}"),
    }
}

const REQUESTS: u32 = 600;

/// The client of the oracle test: asks a few requests ahead, so that both directions are busy at once, and checks all
/// answers. It goes on reading while a large request waits for room, as the daemon may wait for room too.
fn ask_and_check(client: &mut ClientSession) {
    let (mut asked, mut sent, mut payload) = (0, 0, payload_of(0));
    let (mut id, mut index) = (0, 0);
    while id < REQUESTS {
        let may_ask = asked < REQUESTS && asked < id + 8;
        if may_ask {
            sent = client.submissions.submit(asked, &payload, sent).unwrap();
            if sent == payload.len() {
                asked += 1;
                (sent, payload) = (0, payload_of(asked));
            }
        }
        let slot = if may_ask {
            client.completions.pop().unwrap()
        } else {
            next_completion(client)
        };
        client.completions.release();
        let Some(slot) = slot else {
            assert!(may_ask, "the daemon is gone");
            continue;
        };
        assert_eq!(slot.request_id(), id);
        match slot.decode().unwrap() {
            Completion::Tokens { index: found, ids } => {
                assert_eq!((found, &*ids), (index, &[id_of_slot(id, index)][..]));
                index += 1;
            }
            Completion::Done { usage, .. } => {
                assert_eq!((usage.output_tokens, index), (slots_of(id), slots_of(id)));
                (id, index) = (id + 1, 0);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The daemon of the oracle test. Returns how many slots it wrote.
fn check_and_answer(daemon: &mut DaemonSession) -> u32 {
    let mut slots = 0;
    for id in 0..REQUESTS {
        let got = next_submission(daemon).expect("the client is there");
        assert!(
            got == Submission::Submit {
                request_id: id,
                payload: payload_of(id)
            },
            "request {id} arrived changed"
        );
        for index in 0..slots_of(id) {
            say(
                daemon,
                CompletionSlot::tokens(id, index, &[id_of_slot(id, index)]),
            );
            // Steps of one to eight slots.
            if id_of_slot(id, index) % 8 == 0 {
                publish(daemon);
            }
        }
        let usage = Usage {
            output_tokens: slots_of(id),
            ..Usage::default()
        };
        say(daemon, CompletionSlot::done(id, FinishReason::Stop, usage));
        publish(daemon);
        slots += slots_of(id) + 1;
    }
    slots
}

#[test]
fn two_processes_agree_on_every_byte() {
    let (listener, mut other) = start_other("oracle");
    let slots = check_and_answer(&mut accept(&listener));
    assert!(
        slots > 50 * limits::COMPLETION_SLOTS,
        "the ring went round often enough"
    );
    assert!(other.wait().success());
}

#[test]
fn two_threads_agree_on_every_byte() {
    let (mut daemon, mut client) = session();
    let asking = thread::spawn(move || ask_and_check(&mut client));
    check_and_answer(&mut daemon);
    asking.join().unwrap();
}

/// One request and one answer at a time: both sides go to sleep at every step, at ever other moments.
#[test]
fn no_wake_up_is_lost() {
    let (mut daemon, mut client) = session();
    const ROUNDS: u32 = 20_000;
    let pause =
        |numbers: &mut Numbers| (0..numbers.next() % 200).for_each(|_| std::hint::spin_loop());
    let serving = thread::spawn(move || {
        let mut numbers = Numbers(1);
        while let Some(Submission::Cancel { request_id }) = next_submission(&mut daemon) {
            pause(&mut numbers);
            say(
                &mut daemon,
                CompletionSlot::accepted(request_id, request_id),
            );
            publish(&mut daemon);
        }
    });
    let mut numbers = Numbers(2);
    for id in 0..ROUNDS {
        assert!(client.submissions.cancel(id).unwrap());
        pause(&mut numbers);
        let slot = next_completion(&mut client).expect("the daemon is there");
        assert_eq!(
            slot.decode(),
            Ok(Completion::Accepted { prompt_tokens: id })
        );
    }
    drop(client);
    serving.join().unwrap();
}

// ---- what the kernel must refuse -----------------------------------------------------------------------------------

fn reopen_for_writing(fd: &OwnedFd) -> nix::Result<OwnedFd> {
    open(
        format!("/proc/self/fd/{}", fd.as_raw_fd()).as_str(),
        OFlag::O_RDWR | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
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
            matches!(
                result,
                Err(Errno::EPERM | Errno::EACCES | Errno::EBADF | Errno::EINVAL)
            ),
            "{what}: {result:?}"
        );
    };
    let read_write = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    refused("write", write(fd, b"x").map(drop));
    refused("shrink", ftruncate(fd, 0));
    refused("grow", ftruncate(fd, 1 << 20));
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    refused("punch a hole", fallocate(fd, hole, 0, 4096));
    refused(
        "allocate more",
        fallocate(fd, FallocateFlags::empty(), 0, 1 << 20),
    );
    refused(
        "add a seal",
        fcntl(fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).map(drop),
    );
    refused("map writable", map(fd, read_write).map(drop));
    let reading = map(fd, ProtFlags::PROT_READ).unwrap();
    // SAFETY: the page just mapped; nothing refers to it. If a change of protection succeeds the test fails.
    refused("mprotect", unsafe { mprotect(reading, 4096, read_write) });
    // SAFETY: as above.
    refused("MADV_REMOVE", unsafe {
        madvise(reading, 4096, MmapAdvise::MADV_REMOVE)
    });
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
    assert_eq!(
        next_completion(&mut client),
        Some(CompletionSlot::accepted(1, 2))
    );
}

#[test]
fn another_user_cannot_change_what_the_daemon_writes() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become another user");
        return;
    }
    let (listener, mut other) = start_other("other-uid");
    let _daemon = accept(&listener);
    assert!(other.wait().success());
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

// ---- a client that lies --------------------------------------------------------------------------------------------

/// What the daemon says of one slot published by hand.
fn verdict(slot: SubmissionSlot) -> Result<Option<Submission>, Violation> {
    let (mut daemon, up, _stream) = lying_session();
    put(&up, 0, slot);
    up.store_u32(up::SQ_TAIL, 1);
    daemon.submissions.next()
}

fn put(up: &Mapping, place: u32, slot: SubmissionSlot) {
    let bytes: Vec<u8> = slot
        .to_words()
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    up.store_bytes(Geometry::default().submission_offset() + place * 64, &bytes);
}

#[test]
fn lies_in_a_slot_are_found() {
    let good = SubmissionSlot {
        op: 1,
        request_id: 3,
        arena_offset: 8,
        arena_len: 5,
        ..SubmissionSlot::default()
    };
    assert_eq!(
        verdict(good),
        Ok(Some(Submission::Submit {
            request_id: 3,
            payload: vec![0; 5]
        }))
    );
    for op in [0, 4, 255] {
        assert_eq!(
            verdict(SubmissionSlot { op, ..good }),
            Err(Violation::UnknownOp { op })
        );
    }
    assert_eq!(
        verdict(SubmissionSlot { flags: 1, ..good }),
        Err(Violation::Reserved)
    );
    assert_eq!(
        verdict(SubmissionSlot {
            reserved0: 1,
            ..good
        }),
        Err(Violation::Reserved)
    );
    assert_eq!(
        verdict(SubmissionSlot {
            reserved1: [0, 0, 0, 0, 0, 1],
            ..good
        }),
        Err(Violation::Reserved)
    );
    assert_eq!(
        verdict(SubmissionSlot { op: 3, ..good }),
        Err(Violation::Reserved)
    );
    let arena = limits::ARENA_BYTES;
    // The edges of the arena, and sums that wrap.
    for (offset, len) in [(0, arena), (arena, 0), (arena - 8, 8)] {
        assert!(
            verdict(SubmissionSlot {
                arena_offset: offset,
                arena_len: len,
                ..good
            })
            .is_ok()
        );
    }
    let lies = [
        (0, arena + 1),
        (8, arena),
        (arena, 1),
        (arena + 8, 0),
        (arena - 8, 9),
        (1, 1),
        (u32::MAX - 7, 16),
        (8, u32::MAX),
    ];
    for (offset, len) in lies {
        let slot = SubmissionSlot {
            arena_offset: offset,
            arena_len: len,
            ..good
        };
        assert_eq!(verdict(slot), Err(Violation::ArenaRange { offset, len }));
    }
}

#[test]
fn lies_in_an_index_are_found() {
    for tail in [65, 1000, u32::MAX, 1 << 31] {
        let (mut daemon, up, _stream) = lying_session();
        up.store_u32(up::SQ_TAIL, tail);
        assert!(
            matches!(daemon.submissions.next(), Err(Violation::SubmissionTail(_))),
            "{tail}"
        );
        assert!(
            matches!(
                daemon.submissions.arm_wake(),
                Err(Violation::SubmissionTail(_))
            ),
            "{tail}"
        );
    }
    for head in [4, 5, 1000, u32::MAX, 1 << 31] {
        let (mut daemon, up, _stream) = lying_session();
        (0..3).for_each(|id| say(&mut daemon, CompletionSlot::accepted(id, 0)));
        publish(&mut daemon);
        up.store_u32(up::CQ_HEAD, head);
        assert!(
            matches!(daemon.completions.free(), Err(Violation::CompletionHead(_))),
            "{head}"
        );
    }
    // Going back is a lie too.
    let (mut daemon, up, _stream) = lying_session();
    (0..3).for_each(|id| say(&mut daemon, CompletionSlot::accepted(id, 0)));
    publish(&mut daemon);
    up.store_u32(up::CQ_HEAD, 2);
    assert_eq!(daemon.completions.free(), Ok(1023));
    up.store_u32(up::CQ_HEAD, 1);
    assert!(matches!(
        daemon.completions.free(),
        Err(Violation::CompletionHead(_))
    ));
}

#[test]
fn parts_are_bounded_and_belong_together() {
    let part = |op, request_id, arena_len| SubmissionSlot {
        op,
        request_id,
        arena_len,
        ..SubmissionSlot::default()
    };
    let (mut daemon, up, _stream) = lying_session();
    put(&up, 0, part(2, 1, 8));
    put(&up, 1, part(1, 2, 8));
    up.store_u32(up::SQ_TAIL, 2);
    assert_eq!(
        daemon.submissions.next(),
        Err(Violation::PartsMixed {
            unfinished: 1,
            found: 2
        })
    );

    let (mut daemon, up, _stream) = lying_session();
    (0..64).for_each(|place| put(&up, place, part(2, 1, limits::ARENA_BYTES)));
    let parts = (limits::REQUEST_BYTES_MAX / limits::ARENA_BYTES as usize) as u32;
    for tail in 1..=parts {
        up.store_u32(up::SQ_TAIL, tail);
        assert_eq!(daemon.submissions.next(), Ok(None));
    }
    up.store_u32(up::SQ_TAIL, parts + 1);
    assert_eq!(
        daemon.submissions.next(),
        Err(Violation::RequestTooLong { request_id: 1 })
    );
}

#[test]
fn doorbells_for_nothing_are_counted() {
    let (mut daemon, mut client) = session();
    for id in 0..10 {
        client.submissions.cancel(id).unwrap();
    }
    while daemon.submissions.next().unwrap().is_some() {}
    let allowed = 10 + limits::SPURIOUS_DOORBELLS_MAX as usize;
    assert_eq!(daemon.submissions.note_doorbells(allowed), Ok(()));
    assert!(matches!(
        daemon.submissions.note_doorbells(1),
        Err(Violation::SpuriousDoorbells {
            submissions: 10,
            ..
        })
    ));
}

/// A client that writes all over its segment while the daemon reads. Every answer of the daemon's side is a value or a
/// violation; an honest session beside it goes on.
#[test]
fn a_scribbler_hurts_only_itself() {
    let (mut honest_daemon, mut honest) = session();
    let stop = AtomicBool::new(false);
    let (mut violations, mut taken) = (0, 0);
    thread::scope(|scope| {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(1500) {
            let (mut daemon, up, _stream) = lying_session();
            stop.store(false, Ordering::Relaxed);
            let scribbler = scope.spawn({
                let (stop, seed) = (&stop, violations);
                move || scribble(&up, seed, stop)
            });
            let lie = serve_scribbler(&mut daemon, &mut taken, begun + Duration::from_millis(1500));
            violations += u64::from(lie.is_some());
            stop.store(true, Ordering::Relaxed);
            scribbler.join().unwrap();
            ask(&mut honest, 1, b"as ever");
            let submission = Submission::Submit {
                request_id: 1,
                payload: b"as ever".to_vec(),
            };
            assert_eq!(next_submission(&mut honest_daemon), Some(submission));
        }
    });
    assert!(
        violations > 20 && taken > 20,
        "{violations} violations, {taken} submissions"
    );
}

/// Mostly plausible values, now and then anything: pure noise would be refused at the first look.
fn scribble(up: &Mapping, seed: u64, stop: &AtomicBool) {
    let mut numbers = Numbers(seed);
    let words = up.bytes() as u64 / 8;
    let cancel = SubmissionSlot {
        op: 3,
        ..SubmissionSlot::default()
    };
    (0..64).for_each(|place| put(up, place, cancel));
    let mut tail = 0;
    while !stop.load(Ordering::Relaxed) {
        let n = numbers.next();
        match n % 32 {
            0..12 => {
                let request_id = (n >> 8) as u32 % 4;
                let (arena_offset, arena_len) =
                    ((n >> 16) as u32 % 4200 * 8, (n >> 32) as u32 % 33_000);
                let submit = SubmissionSlot {
                    op: 1,
                    request_id,
                    arena_offset,
                    arena_len,
                    ..cancel
                };
                let slot = [
                    submit,
                    SubmissionSlot { op: 2, ..submit },
                    SubmissionSlot {
                        request_id,
                        ..cancel
                    },
                ];
                put(
                    up,
                    (n >> 48) as u32 % 64,
                    slot[if (n >> 56) % 16 == 0 {
                        1
                    } else {
                        (n >> 60) as usize % 2 * 2
                    }],
                );
            }
            12..24 => {
                tail += (n >> 8) as u32 % 3;
                up.store_u32(up::SQ_TAIL, tail);
                thread::yield_now();
            }
            24 => up.store_u32(up::CQ_HEAD, (n >> 8) as u32 % 4),
            25 => up.store_u32(up::CQ_WAKE_AT, (n >> 8) as u32),
            26..31 => up.store_u64((0x2000 + (n >> 8) % 8192 * 8) as u32, numbers.next()),
            _ if (n >> 8) % 16 == 0 => {
                up.store_u64((numbers.next() % words) as u32 * 8, numbers.next())
            }
            _ => thread::yield_now(),
        }
    }
}

fn serve_scribbler(
    daemon: &mut DaemonSession,
    taken: &mut u64,
    until: Instant,
) -> Option<Violation> {
    let mut turn = || -> Result<(), Violation> {
        while let Some(submission) = daemon.submissions.next()? {
            *taken += 1;
            if let Submission::Submit {
                request_id,
                payload,
            } = submission
            {
                if let Err(_error) = GenerateRequest::decode(&payload) {
                    let _ = daemon
                        .completions
                        .push(CompletionSlot::error(request_id, Reject::Malformed));
                }
            }
        }
        daemon.completions.free()?;
        publish(daemon);
        daemon.submissions.arm_wake().map(drop)
    };
    while Instant::now() < until {
        if let Err(violation) = turn() {
            return Some(violation);
        }
    }
    None
}

// ---- handshakes ----------------------------------------------------------------------------------------------------

#[test]
fn garbage_handshakes_are_refused() {
    let mut numbers = Numbers(3);
    let (mut refused, mut pending) = (0, 0);
    for round in 0..2000 {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut handshake = Handshake::new(ours).unwrap();
        assert_eq!(handshake.peer().uid, nix::unistd::getuid().as_raw());
        let len = (numbers.next() % 100) as usize;
        let mut bytes: Vec<u8> = (0..len).map(|_| numbers.next() as u8).collect();
        if round % 2 == 0 && len >= 8 {
            // Right up to the version.
            bytes[..8].copy_from_slice(&Hello::default().to_bytes()[..8]);
        }
        theirs.write_all(&bytes).unwrap();
        match handshake.readable() {
            Progress::Refuse(refusal) => {
                refused += 1;
                handshake.refuse(refusal, Duration::ZERO);
                match handshake::receive_welcome(theirs, SECONDS_5) {
                    Err(ConnectError::Refused { refusal: told, .. }) => assert_eq!(told, refusal),
                    other => panic!("{other:?}"),
                }
            }
            Progress::Pending => {
                pending += 1;
                assert!(len < HELLO_BYTES);
                drop(theirs);
                assert_eq!(handshake.readable(), Progress::HungUp);
            }
            Progress::Hello(_) => assert!(round % 2 == 0 && len >= HELLO_BYTES),
            Progress::HungUp => panic!("the client is there"),
        }
    }
    assert!(refused > 200 && pending > 200);
}

#[test]
fn a_slow_handshake_ends_in_time_and_blocks_nobody() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut slow = Handshake::new(ours).unwrap();
    let begun = Instant::now();
    let hello = Hello::default().to_bytes();
    let mut sent = 0;
    loop {
        if sent < HELLO_BYTES - 1 {
            theirs.write_all(&hello[sent..=sent]).unwrap();
            sent += 1;
        }
        let looked = Instant::now();
        let progress = slow.readable();
        assert!(
            looked.elapsed() < Duration::from_millis(200),
            "readable() waited"
        );
        match progress {
            Progress::Pending => assert!(begun.elapsed() < SECONDS_5),
            Progress::Refuse(refusal) => break assert_eq!(refusal, Refusal::TimedOut),
            other => panic!("{other:?}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
    assert!(Instant::now() >= slow.deadline() && begun.elapsed() >= limits::HANDSHAKE_TIMEOUT);
    // A client that sends its hello in pieces, in time, is welcome.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut pieces = Handshake::new(ours).unwrap();
    for byte in &hello[..HELLO_BYTES - 1] {
        theirs.write_all(&[*byte]).unwrap();
        assert_eq!(pieces.readable(), Progress::Pending);
    }
    theirs.write_all(&hello[HELLO_BYTES - 1..]).unwrap();
    assert_eq!(pieces.readable(), Progress::Hello(Hello::default()));
}

// ---- ends ----------------------------------------------------------------------------------------------------------

/// In a process of its own, because it counts all of its descriptors and mappings.
#[test]
fn a_killed_client_leaves_nothing_behind() {
    let (_listener, mut other) = start_other("reclaim");
    assert!(other.wait().success());
}

fn reclaim(path: &std::path::Path) {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    let held = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let segments = maps
            .lines()
            .filter(|line| line.contains("llmd-") && line.contains("memfd:"))
            .count();
        (
            segments,
            std::fs::read_dir("/proc/self/fd").unwrap().count(),
        )
    };
    let before = held();
    assert_eq!(before.0, 0);
    for _ in 0..5 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env("LLMD_RINGS_ROLE", "victim")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let daemon = accept(&listener);
        assert_eq!(
            held(),
            (2, before.1 + 1),
            "two mappings and one descriptor for a session"
        );
        victim.kill().unwrap();
        let killed = Instant::now();
        assert!(daemon.socket.wait(Some(SECONDS_5)).unwrap().hung_up);
        drop(daemon);
        assert!(killed.elapsed() < Duration::from_secs(1));
        assert_eq!(held(), before);
        victim.wait().unwrap();
    }
}

/// A child of a fork shares neither memory nor the right to end the session.
#[test]
fn a_forked_child_leaves_its_parents_session_alone() {
    let path = std::env::temp_dir().join(format!("llmd-rings-{}-fork.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let (go, gone) = std::sync::mpsc::channel();
    let serving = thread::spawn(move || {
        let mut daemon = accept(&listener);
        let Some(Submission::Submit { request_id, .. }) = next_submission(&mut daemon) else {
            panic!("no request")
        };
        gone.recv().unwrap();
        say(
            &mut daemon,
            CompletionSlot::done(request_id, FinishReason::Stop, Usage::default()),
        );
        publish(&mut daemon);
        // Nothing of the child's came: no cancel, no hang-up before the parent's own.
        assert_eq!(next_submission(&mut daemon), None);
    });
    let client = Client::connect(&path).unwrap();
    let mut generation = client.generate(GenerateRequest::text("x")).unwrap();
    // SAFETY: the child calls nothing that needs another thread of this process (glibc's malloc is safe after fork) and ends
    // by a signal, without running anybody's destructors but those of the two values it drops itself.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let forked = matches!(
                client.generate(GenerateRequest::text("y")),
                Err(Error::Forked)
            ) && matches!(generation.next(), Some(Err(Error::Forked)))
                && generation.next().is_none();
            drop(generation);
            drop(client);
            let maps =
                std::fs::read_to_string("/proc/self/maps").unwrap_or_else(|_| "memfd:llmd-".into());
            let clean = !maps.contains("memfd:llmd-");
            // Ends at once by a signal that tells the outcome: exit() would run the parent's handlers.
            let _ = raise(if forked && clean {
                Signal::SIGTERM
            } else {
                Signal::SIGKILL
            });
            std::process::abort();
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(
                status,
                nix::sys::wait::WaitStatus::Signaled(child, Signal::SIGTERM, false)
            );
        }
    }
    go.send(()).unwrap();
    assert!(matches!(generation.next(), Some(Ok(Event::Done { .. }))));
    drop(generation);
    drop(client);
    serving.join().unwrap();
    let _ = std::fs::remove_file(&path);
}
