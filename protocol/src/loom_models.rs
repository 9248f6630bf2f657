//! Ring and park under loom: every interleaving and every value the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p llmd-protocol --lib loom` (with a target folder of its own). Each model must pass as
//! written, and must fail when any one ordering it depends on is taken away.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex as LoomMutex};
use loom::thread;

use crate::ring::{Consumer, Producer, RingMemory, publisher_fence, wants_doorbell};
use crate::sync::{AtomicU32, Site, weakened};

/// A ring in loom's memory, shared by std's Arc: loom's own would panic once more while a found deadlock unwinds.
/// A slot is a plain cell: loom reports any access to it that is not ordered after the
/// other side's.
struct Ring {
    tail: AtomicU32,
    head: AtomicU32,
    wake_at: AtomicU32,
    slots: Vec<UnsafeCell<u64>>,
}

// SAFETY: the cells are loom's, which panics on any unordered access instead of letting it happen.
unsafe impl Sync for Ring {}
// SAFETY: as above.
unsafe impl Send for Ring {}

impl RingMemory<1> for Arc<Ring> {
    fn capacity(&self) -> u32 {
        self.slots.len() as u32
    }
    fn tail(&self) -> &AtomicU32 {
        &self.tail
    }
    fn head(&self) -> &AtomicU32 {
        &self.head
    }
    fn wake_at(&self) -> &AtomicU32 {
        &self.wake_at
    }
    fn load_slot(&self, place: u32) -> [u64; 1] {
        // SAFETY: loom has checked that no write is concurrent when it calls the closure.
        self.slots[place as usize].with(|p| [unsafe { *p }])
    }
    fn store_slot(&self, place: u32, words: [u64; 1]) {
        // SAFETY: loom has checked that no access is concurrent when it calls the closure.
        self.slots[place as usize].with_mut(|p| unsafe { *p = words[0] });
    }
}

fn ring(capacity: usize) -> Arc<Ring> {
    Arc::new(Ring {
        tail: AtomicU32::new(0),
        head: AtomicU32::new(0),
        wake_at: AtomicU32::new(0),
        slots: (0..capacity).map(|_| UnsafeCell::new(u64::MAX)).collect(),
    })
}

/// Three values through two slots: the second lap overwrites what the consumer must have read.
fn transfer() {
    let memory = ring(2);
    let mut producer: Producer<_, 1> = Producer::new(memory.clone());
    let mut consumer: Consumer<_, 1> = Consumer::new(memory);
    let writer = thread::spawn(move || {
        for value in 0..3 {
            while producer.free() == 0 && producer.refresh().unwrap() == 0 {
                thread::yield_now();
            }
            producer.push([value]).unwrap();
            producer.publish().unwrap();
        }
    });
    for value in 0..3 {
        let got = loop {
            match consumer.pop().unwrap() {
                Some(words) => break words[0],
                None => thread::yield_now(),
            }
        };
        assert_eq!(got, value);
        consumer.release();
    }
    writer.join().unwrap();
}

/// The socket of the model: counts doorbells, and lets the consumer sleep until there is one.
struct Bell {
    rung: LoomMutex<u32>,
    changed: Condvar,
}

/// Two publishes against a consumer that sleeps whenever it may. A lost wake-up is a deadlock, which loom reports.
fn park() {
    let memory = ring(4);
    let bell = Arc::new(Bell { rung: LoomMutex::new(0), changed: Condvar::new() });
    let mut producer: Producer<_, 1> = Producer::new(memory.clone());
    let mut consumer: Consumer<_, 1> = Consumer::new(memory.clone());
    let writers_bell = bell.clone();
    let writer = thread::spawn(move || {
        for value in 0..2 {
            producer.push([value]).unwrap();
            let published = producer.publish().unwrap();
            publisher_fence();
            if wants_doorbell(&memory, published) {
                *writers_bell.rung.lock().unwrap() += 1;
                writers_bell.changed.notify_one();
            }
        }
    });
    for value in 0..2 {
        let got = loop {
            if let Some(words) = consumer.pop().unwrap() {
                break words[0];
            }
            if consumer.arm().unwrap() {
                let mut rung = bell.rung.lock().unwrap();
                while *rung == 0 {
                    rung = bell.changed.wait(rung).unwrap();
                }
                *rung = 0;
            }
        };
        assert_eq!(got, value);
    }
    writer.join().unwrap();
}

/// Models run one at a time: which site is taken away is a global.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// None if the model held, else what loom said.
fn failure(without: Option<Site>, model: fn()) -> Option<String> {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    weakened::set(without);
    let result = catch_unwind(AssertUnwindSafe(|| loom::model::Builder::new().check(model)));
    weakened::set(None);
    let payload = result.err()?;
    let text = payload.downcast_ref::<String>().cloned();
    Some(text.or_else(|| payload.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default())
}

#[test]
fn loom_ring_transfers() {
    assert_eq!(failure(None, transfer), None);
}

#[test]
fn loom_ring_needs_each_ordering() {
    for site in [Site::TailRelease, Site::TailAcquire, Site::HeadRelease, Site::HeadAcquire] {
        let said = failure(Some(site), transfer).expect("the model notices");
        assert!(said.contains("Causality violation"), "without {site:?}: {said}");
    }
}

#[test]
fn loom_park_loses_no_wake_up() {
    assert_eq!(failure(None, park), None);
}

#[test]
fn loom_park_needs_both_fences() {
    for site in [Site::PublisherFence, Site::ParkerFence] {
        let said = failure(Some(site), park).expect("the model notices");
        assert!(said.contains("deadlock"), "without {site:?}: {said}");
    }
}
