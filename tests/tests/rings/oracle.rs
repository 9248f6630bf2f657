//! Every byte both ways, against numbers that both sides can make; and nobody sleeps through a doorbell.

use std::thread;

use llmd_protocol::completion::{Completion, CompletionSlot};
use llmd_protocol::limits;
use llmd_protocol::message::{FinishReason, Usage};
use llmd_protocol::session::{ClientSession, DaemonSession, Submission};

use crate::pair::{Numbers, accept, next_completion, next_submission, publish, say, session};
use crate::start_other;

const REQUESTS: u32 = 600;

/// The client of the oracle test: asks a few requests ahead, so that both directions are busy at once, and checks all
/// answers. It goes on reading while a large request waits for room, as the daemon may wait for room too.
pub(crate) fn ask_and_check(client: &mut ClientSession) {
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
        let slot = if may_ask { client.completions.pop().unwrap() } else { next_completion(client) };
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
        assert!(got == Submission::Submit { request_id: id, payload: payload_of(id) }, "request {id} arrived changed");
        for index in 0..slots_of(id) {
            say(daemon, CompletionSlot::tokens(id, index, &[id_of_slot(id, index)]));
            // Steps of one to eight slots.
            if id_of_slot(id, index).is_multiple_of(8) {
                publish(daemon);
            }
        }
        let usage = Usage { output_tokens: slots_of(id), ..Usage::default() };
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
    assert!(slots > 50 * limits::COMPLETION_SLOTS, "the ring went round often enough");
    assert!(other.succeeded());
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
    let pause = |numbers: &mut Numbers| (0..numbers.next() % 200).for_each(|_| std::hint::spin_loop());
    let serving = thread::spawn(move || {
        let mut numbers = Numbers(1);
        while let Some(Submission::Cancel { request_id }) = next_submission(&mut daemon) {
            pause(&mut numbers);
            say(&mut daemon, CompletionSlot::accepted(request_id, request_id));
            publish(&mut daemon);
        }
    });
    let mut numbers = Numbers(2);
    for id in 0..ROUNDS {
        assert!(client.submissions.cancel(id).unwrap());
        pause(&mut numbers);
        let slot = next_completion(&mut client).expect("the daemon is there");
        assert_eq!(slot.decode(), Ok(Completion::Accepted { prompt_tokens: id }));
    }
    drop(client);
    serving.join().unwrap();
}

/// What request `id` says: mostly short, now and then larger than the arena.
fn payload_of(id: u32) -> Vec<u8> {
    let mut numbers = Numbers(id.into());
    let len = match numbers.next() % 64 {
        0 => 70_000 + numbers.next() % 100_000,
        1..8 => 1 + numbers.next() % 20_000,
        _ => 1 + numbers.next() % 500,
    };
    (0..len).map(|i| (i as u8).wrapping_mul(id as u8) ^ (i >> 8) as u8 ^ id as u8).collect()
}

/// The answer to it: so many slots, each with a number of its own.
fn slots_of(id: u32) -> u32 {
    (Numbers(!u64::from(id)).next() % 400) as u32
}

fn id_of_slot(id: u32, index: u32) -> u32 {
    Numbers(u64::from(id) << 32 | u64::from(index)).next() as u32
}
