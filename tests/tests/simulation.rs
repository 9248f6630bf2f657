//! The scheduler and its cache, simulated: every promise is checked after every step of thousands of random histories.
//!
//! The model is an oracle: a key-value slot holds a hash of the salt and of all tokens up to its position, and the next token
//! is a hash of the last slot. So a block that is read before it was written, or that holds what others wrote, is seen at
//! once, and every request's output is known from the request alone.
//!
//! `LLMD_SIM_SEEDS=n` runs n histories instead of the default; `LLMD_SIM_SEED=s` runs only that one.
//!
//! That the checks bite was tried by breaking the rules one at a time. Each of these turned tests red: evicting the
//! cached blocks a sequence is about to hold; publishing before the step that writes; matching all of a prompt; ignoring the
//! salt; letting go of a table's first block first; keeping the same content twice; chunks that end inside blocks; a decode
//! left out; half the budget unused; preempting the oldest; putting the preempted at the end of the queue, with a token
//! less, or with `computed` as it was; admitting below the watermark, without headroom, or a fifth partial prefill; queueing
//! what never fits; going on beyond the cache; keeping a cancelled sequence's blocks; not counting generations; a stop id one
//! token too early; sampling for who wants no token; static batches without padding, or that take others in.

#[path = "simulation/oracle.rs"]
mod oracle;
#[path = "simulation/world.rs"]
mod world;

use llmd::scheduler::{Policy, SchedulerSettings, SubmitError, tokens_per_step_least};
use llmd::sequence::{FinishReason, NewSequence, Sampling, SequenceId};
use oracle::{Random, alone, request, sampling};
use world::World;

/// Histories run by default: as many as take a few seconds.
const SEEDS: u64 = 2000;

fn settings() -> SchedulerSettings {
    SchedulerSettings {
        policy: Policy::Continuous,
        tokens_per_step: 128,
        sequences_running_max: 16,
        prefill_chunk_max: 64,
        context_max: 4096,
        kv_blocks: 256,
        prefix_cache: true,
        waiting_max: 64,
    }
}

// Random histories.

/// Says which seed failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {0} failed; LLMD_SIM_SEED={0} runs it alone", self.0);
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

#[test]
fn random_histories_keep_every_promise() {
    let seeds = match number("LLMD_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("LLMD_SIM_SEEDS").unwrap_or(SEEDS),
    };
    let (mut preempted, mut cached, mut ends) = (0, 0, std::collections::BTreeMap::new());
    for seed in seeds.clone() {
        let _named = Seed(seed);
        let world = history(seed);
        if seed % 8 == 0 {
            assert_eq!(history(seed).fingerprint, world.fingerprint, "the same history gave other plans");
        }
        for record in world.ended.values() {
            preempted += record.preemptions;
            cached += record.cached;
            *ends.entry(format!("{:?}", record.reason)).or_insert(0) += 1;
        }
    }
    // A history in which nothing happens proves nothing.
    if seeds.end - seeds.start >= 100 {
        assert!(preempted > 0 && cached > 0 && ends.len() >= 5, "{preempted} {cached} {ends:?}");
    }
    println!("{} histories: {preempted} preemptions, {cached} cached tokens, ends {ends:?}", seeds.end - seeds.start);
}

fn history(seed: u64) -> World {
    let mut random = Random(oracle::mix(seed));
    let mut world = World::new(random_settings(&mut random));
    let texts: Vec<_> = (0..3).map(|_| random.tokens(120)).collect();
    let mut to_come = random.within(3, 30);
    let mut gone = Vec::new();
    while to_come > 0 || random.below(30) > 0 {
        if to_come > 0 && !random.once_in(3) {
            to_come -= 1;
            match world.submit(random_request(&mut random, &texts, &world)) {
                Ok(_) | Err(SubmitError::QueueFull { .. }) => {}
                Err(error) => {
                    assert!(matches!(error, SubmitError::NeverFits { .. } | SubmitError::PromptTooLong { .. }))
                }
            }
        }
        disturb(&mut random, &mut world, &mut gone);
        world.step();
    }
    world.drain();
    world
}

fn random_settings(random: &mut Random) -> SchedulerSettings {
    let rows = random.within(1, 12);
    SchedulerSettings {
        policy: if random.once_in(4) { Policy::Static } else { Policy::Continuous },
        tokens_per_step: tokens_per_step_least(rows) + random.below(80),
        sequences_running_max: rows,
        prefill_chunk_max: [16, 64, 512][random.below(3)],
        context_max: random.within(20, 200),
        kv_blocks: random.within(2, 40),
        prefix_cache: !random.once_in(4),
        waiting_max: random.within(1, 24),
    }
}

fn random_request(random: &mut Random, texts: &[Vec<u32>], world: &World) -> NewSequence {
    let earlier = random.below(world.ended.len().max(1));
    let mut prompt = match world.ended.values().nth(earlier) {
        // The next turn of a dialogue.
        Some(record) if random.once_in(3) => [&record.new.prompt[..], &record.output].concat(),
        _ => {
            let text = &texts[random.below(texts.len())];
            text[..random.below(text.len())].to_vec()
        }
    };
    let more = random.within(usize::from(prompt.is_empty()), 20);
    prompt.extend(random.tokens(more));
    let stop_ids = if random.once_in(2) { 0 } else { random.below(3) };
    let mut stop_token_ids = random.tokens(stop_ids);
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    let max_tokens = if random.once_in(12) { 0 } else { random.within(1, 70) as u32 };
    let sampling = Sampling {
        seed: random.next() % 3,
        min_tokens: random.below(6) as u32,
        stop_token_ids,
        ..sampling(max_tokens)
    };
    NewSequence { prompt, sampling, cache_salt: (random.next() % 4).saturating_sub(2) }
}

/// Clients that go away or do not read, stop strings, preemption by hand, and calls that come too late.
fn disturb(random: &mut Random, world: &mut World, gone: &mut Vec<SequenceId>) {
    let live = world.live();
    if !live.is_empty() {
        let id = live[random.below(live.len())];
        match random.below(60) {
            0..3 => {
                let reason = [FinishReason::Cancelled, FinishReason::StopString, FinishReason::SlowReader];
                assert!(world.finish(id, reason[random.below(3)]));
                gone.push(id);
            }
            3..6 => {
                world.preempt(id);
            }
            6..9 => world.pause(id, true),
            9..18 => world.pause(id, false),
            _ => {}
        }
    }
    if !gone.is_empty() && random.once_in(8) {
        let id = gone[random.below(gone.len())];
        assert!(!world.finish(id, FinishReason::Cancelled) && !world.preempt(id));
        world.pause(id, true);
        world.pause(id, false);
    }
}

// Scheduling: what users of other engines ran into.

#[test]
fn a_prompt_that_can_never_fit_is_refused_and_blocks_nobody() {
    let mut world = World::new(SchedulerSettings { kv_blocks: 8, context_max: 200, ..settings() });
    let refused = world.submit(request(1, 128, 1)).unwrap_err();
    assert_eq!(refused, SubmitError::NeverFits { needed_blocks: 9, total_blocks: 8 });
    let refused = world.submit(request(1, 200, 1)).unwrap_err();
    assert_eq!(refused, SubmitError::PromptTooLong { prompt_len: 200, context_max: 200 });
    // The largest that does fit goes through, and so does what stands behind it.
    let largest = world.add(request(1, 127, 1));
    let small = world.add(request(2, 5, 3));
    world.drain();
    assert_eq!(world.record(largest).reason, FinishReason::Length);
    assert_eq!(world.record(small).output.len(), 3);
}

#[test]
fn a_preempted_sequence_comes_back_once_and_does_not_thrash() {
    // Each alone fits; together they need twice the cache.
    let mut world = World::new(SchedulerSettings { kv_blocks: 32, ..settings() });
    let ids: Vec<_> = (0..4).map(|i| world.add(request(i, 40, 400))).collect();
    world.drain();
    let preemptions: Vec<_> = ids.iter().map(|&id| world.record(id).preemptions).collect();
    assert_eq!(preemptions[0], 0, "the leader");
    assert!(preemptions.iter().sum::<u32>() >= 2, "the cache was too large for this test: {preemptions:?}");
    assert!(preemptions.iter().all(|&n| n <= 3), "{preemptions:?}");
    let useful = 4 * (40 + 399);
    // What a victim had is evicted by whoever goes on, so coming back costs its length at most.
    assert!(world.tokens_computed < useful * 3 / 2, "{} positions for {useful}", world.tokens_computed);
}

#[test]
fn nobody_is_admitted_until_enough_is_free_again() {
    // The leader all but fills the cache; the victim is small, and soon there would be room for it: to be preempted again.
    let mut world = World::new(settings());
    let leader = world.add(request(1, 240 * 16, 120));
    while world.scheduler.sequence(leader).unwrap().output_len() == 0 {
        world.advance();
    }
    let ends = world.add(request(2, 60, 60));
    let victim = world.add(request(3, 20, 100));
    while world.last.preempted.is_empty() {
        world.advance();
    }
    assert_eq!(world.last.preempted, [victim]);
    while !world.ended.contains_key(&leader) {
        world.advance();
        assert!(world.last.admitted.is_empty());
    }
    let needed = world.scheduler.sequence(victim).unwrap().tokens.len().div_ceil(16);
    assert!(world.ended.contains_key(&ends) && needed < 8, "there was room for {needed} blocks before");
    world.drain();
    assert_eq!(world.record(victim).preemptions, 1);
}

#[test]
fn a_preempted_sequence_keeps_its_place_and_loses_no_token() {
    let mut world = World::new(SchedulerSettings { sequences_running_max: 2, ..settings() });
    let first = world.add(request(1, 20, 30));
    let second = world.add(request(2, 20, 30));
    let third = world.add(request(3, 20, 30));
    for _ in 0..10 {
        world.step();
    }
    assert!(world.preempt(second) && !world.preempt(third));
    let output = world.scheduler.sequence(second).unwrap().output().to_vec();
    assert_eq!(output.len(), 10);
    assert!(world.scheduler.waiting().map(|s| s.id).eq([second, third]), "back in front of whoever came later");
    world.step();
    assert_eq!(world.last.admitted, [second]);
    assert!(world.scheduler.sequence(second).unwrap().output().starts_with(&output));
    world.drain();
    assert_eq!(world.record(second).output, alone(&request(2, 20, 30), &settings()).0);
    assert!(world.record(first).last_step < world.record(third).last_step);
}

#[test]
fn a_block_is_shared_only_after_the_step_that_wrote_it() {
    let mut world = World::new(settings());
    let same = request(1, 50, 4);
    let (a, b) = (world.add(same.clone()), world.add(same.clone()));
    world.step(); // both in one step: neither can read what the other is writing
    assert_eq!(world.last.admitted, [a, b]);
    let c = world.add(same);
    world.drain();
    assert_eq!((world.record(a).cached, world.record(b).cached, world.record(c).cached), (0, 0, 48));
}

#[test]
#[should_panic(expected = "never written")]
fn the_memory_sees_what_was_never_written() {
    let mut world = World::new(settings());
    world.add(request(1, 50, 4));
    world.step();
    world.forget_memory();
    world.step();
}

#[test]
fn a_long_prompt_does_not_freeze_the_streams() {
    let mut world = World::new(settings());
    let streams: Vec<_> = (0..8).map(|i| world.add(request(i, 10, 200))).collect();
    world.step();
    let long = world.add(request(99, 2000, 5));
    let mut steps = 0;
    let len = |world: &World, id| world.scheduler.sequence(id).unwrap().output_len();
    while len(&world, long) == 0 {
        let before: Vec<_> = streams.iter().map(|&id| len(&world, id)).collect();
        world.advance();
        steps += 1;
        for (&id, before) in streams.iter().zip(before) {
            assert_eq!(len(&world, id), before + 1, "a stream stood still");
        }
    }
    assert_eq!(steps, 2000usize.div_ceil(64), "and the long one goes on a whole chunk a step");
    world.drain();
}

#[test]
fn decodes_leave_the_reserve_to_prefills() {
    let mut world = World::new(SchedulerSettings { tokens_per_step: tokens_per_step_least(16), ..settings() });
    for i in 0..15 {
        world.add(request(i, 10, 300));
        world.step();
    }
    let long = world.add(request(99, 160, 1));
    let joined = world.steps;
    while !world.ended.contains_key(&long) {
        world.advance();
    }
    assert_eq!(world.steps - joined, 10, "a block each step");
}

#[test]
fn requests_join_and_leave_in_mid_flight() {
    let mut world = World::new(settings());
    let long = world.add(request(1, 10, 100));
    for i in 2..20 {
        let short = world.add(request(i, 10, 3));
        world.step();
        assert_eq!(world.last.admitted.last(), Some(&short), "joins at the next step");
        world.step();
        world.step();
        assert!(world.ended.contains_key(&short), "and leaves in the step that ends it");
    }
    assert!(world.scheduler.sequence(long).is_some());
    world.drain();
}

#[test]
fn a_sequence_that_outgrows_the_cache_ends_with_what_it_has() {
    let tiny = SchedulerSettings { kv_blocks: 4, ..settings() };
    let mut world = World::new(tiny);
    let (first, second) = (world.add(request(1, 20, 500)), world.add(request(2, 20, 10)));
    world.drain();
    assert_eq!(world.record(first).reason, FinishReason::KvExhausted);
    assert_eq!(world.record(first).output.len(), 4 * 16 + 1 - 20, "the last token needs no slot");
    assert_eq!(world.record(second).reason, FinishReason::Length);
}

#[test]
fn the_context_ends_a_sequence_with_length() {
    let mut world = World::new(SchedulerSettings { context_max: 50, ..settings() });
    let id = world.add(request(1, 20, u32::MAX));
    world.drain();
    assert_eq!((world.record(id).reason, world.record(id).output.len()), (FinishReason::Length, 30));
}

#[test]
fn no_tokens_may_be_asked_for() {
    let mut world = World::new(SchedulerSettings { context_max: 100, ..settings() });
    let id = world.add(request(1, 100, 0));
    let next = world.add(request(1, 99, 1));
    world.drain();
    assert_eq!((world.record(id).reason, world.record(id).output.len()), (FinishReason::Length, 0));
    assert_eq!(world.record(next).output.len(), 1);
}

#[test]
fn min_tokens_holds_stop_ids_off_for_exactly_so_many_tokens() {
    for min_tokens in 0..5 {
        let mut world = World::new(settings());
        let all: Vec<u32> = (0..oracle::VOCABULARY as u32).collect();
        let sampling = Sampling { min_tokens, stop_token_ids: all, ..sampling(100) };
        let id = world.add(NewSequence { sampling, ..request(1, 20, 0) });
        world.drain();
        let record = world.record(id);
        assert_eq!((record.reason, record.output.len()), (FinishReason::Stop, min_tokens as usize + 1));
    }
}

// Output does not depend on the company.

#[test]
fn a_request_gives_the_same_tokens_whatever_happens_around_it() {
    let wanted = request(7, 150, 60);
    let expected = alone(&wanted, &settings()).0;
    for policy in [Policy::Continuous, Policy::Static] {
        for prefill_chunk_max in [16, 64, 512] {
            for prefix_cache in [false, true] {
                let tokens_per_step = 640;
                let all = SchedulerSettings { policy, prefill_chunk_max, prefix_cache, tokens_per_step, ..settings() };
                let mut world = World::new(SchedulerSettings { sequences_running_max: 32, kv_blocks: 512, ..all });
                for i in 0..31 {
                    // Some share its beginning.
                    let mut other = request(100 + i, 20 + 10 * i as usize, 5 + 3 * i as u32);
                    other.prompt.splice(..16, wanted.prompt[..16].iter().copied());
                    world.add(other);
                }
                let id = world.add(wanted.clone());
                let mut forced = 0;
                while !world.ended.contains_key(&id) {
                    world.advance();
                    // In its prefill, after its first token, and later.
                    forced += usize::from(forced < 3 && world.steps.is_multiple_of(7) && world.preempt(id));
                }
                world.drain();
                assert_eq!(world.record(id).output, expected);
                assert_eq!(forced, 3);
            }
        }
    }
}

#[test]
fn the_next_turn_of_a_dialogue_starts_where_the_last_one_ended() {
    let mut world = World::new(settings());
    let first = request(1, 40, 60);
    let id = world.add(first.clone());
    world.drain();
    let turn = [&first.prompt[..], &world.record(id).output, &[1, 2, 3]].concat();
    let id = world.add(NewSequence { prompt: turn, sampling: sampling(5), cache_salt: 0 });
    world.drain();
    assert_eq!(world.record(id).cached, 96, "40 + 60 tokens, but for the last, in whole blocks");
}

#[test]
fn a_prompt_never_matches_whole() {
    let mut world = World::new(settings());
    let id = world.add(request(1, 64, 0));
    world.drain();
    assert_eq!(world.record(id).cached, 0);
    let id = world.add(request(1, 64, 1));
    world.drain();
    assert_eq!(world.record(id).cached, 48, "the last token is computed: its logits are wanted");
}

#[test]
fn no_salt_finds_what_another_left() {
    let mut world = World::new(settings());
    world.add(request(1, 100, 20));
    world.drain();
    let other = world.add(NewSequence { cache_salt: 1, ..request(1, 100, 20) });
    world.drain();
    assert_eq!(world.record(other).cached, 0);
    let own = world.add(request(1, 100, 20));
    world.drain();
    assert_eq!(world.record(own).cached, 96);
}

#[test]
fn what_was_used_last_is_evicted_last() {
    let mut world = World::new(SchedulerSettings { kv_blocks: 12, ..settings() });
    for name in [1, 2, 1, 3] {
        // Four blocks each: the third is a hit, the fourth has to evict.
        world.add(request(name, 64, 1));
        world.drain();
    }
    world.add(request(4, 64, 1));
    world.drain();
    let kept = world.add(request(1, 64, 1));
    world.drain();
    assert!(world.record(kept).cached > 0, "used again before the others");
    let lost = world.add(request(2, 64, 1));
    world.drain();
    assert_eq!(world.record(lost).cached, 0);
}

// Cancel and leaks.

#[test]
fn aborts_never_leak_blocks() {
    let mut world = World::new(SchedulerSettings { kv_blocks: 64, ..settings() });
    let mut random = Random(5);
    for i in 0..600 {
        let id = world.add(request(i % 7, random.within(1, 300), 50));
        for _ in 0..random.below(8) {
            world.step();
        }
        // Waiting, in the middle of its prefill, decoding, or at its end.
        world.finish(id, FinishReason::Cancelled);
    }
    assert!(world.scheduler.drained(), "load gauges are 0 at once");
    let usage = world.scheduler.kv_usage();
    assert_eq!((usage.owned, usage.free + usage.cached), (0, 64));
}

#[test]
fn a_prefill_can_be_cancelled_in_its_middle() {
    let mut world = World::new(settings());
    let long = world.add(request(1, 2000, 5));
    world.step();
    assert_eq!(world.scheduler.sequence(long).unwrap().computed, 64);
    let owned = world.scheduler.kv_usage().owned;
    assert!(world.finish(long, FinishReason::Cancelled));
    assert_eq!((owned, world.scheduler.kv_usage().owned), (125, 0));
    assert!(!world.step(), "it is in no later plan");
}

#[test]
fn finishing_twice_or_too_late_is_harmless() {
    let mut world = World::new(settings());
    let id = world.add(request(1, 20, 5));
    world.step();
    assert!(world.finish(id, FinishReason::StopString));
    assert!(!world.finish(id, FinishReason::Cancelled));
    let heir = world.add(request(2, 20, 5));
    assert_eq!(heir.index, id.index, "the place is used again");
    assert!(!world.finish(id, FinishReason::Cancelled) && !world.preempt(id));
    world.drain();
    assert_eq!(world.record(heir).reason, FinishReason::Length);
}

#[test]
fn who_is_set_aside_holds_nothing_and_comes_back_to_its_place() {
    let mut world = World::new(SchedulerSettings { sequences_running_max: 1, ..settings() });
    let (first, second) = (world.add(request(1, 40, 20)), world.add(request(2, 40, 20)));
    for _ in 0..5 {
        world.advance();
    }
    world.pause(first, true);
    world.pause(first, true);
    assert_eq!((world.scheduler.kv_usage().owned, world.scheduler.paused_len()), (0, 1));
    world.advance();
    assert_eq!(world.last.admitted, [second], "nobody waits for a client that does not read");
    let third = world.add(request(3, 40, 20));
    world.pause(first, false);
    assert!(world.scheduler.waiting().map(|s| s.id).eq([first, third]));
    world.pause(second, true);
    world.pause(third, true);
    while world.step() {}
    assert_eq!(world.record(first).output.len(), 20);
    assert!(!world.scheduler.has_work() && !world.scheduler.drained());
    assert!(world.finish(third, FinishReason::SlowReader));
    world.drain();
    assert_eq!(world.record(first).cached, 0, "finding one's own blocks again is not a cached prompt");
}

// The control experiment.

#[test]
fn a_static_batch_takes_nobody_in_and_pays_for_the_dead() {
    let mixed = |policy| {
        let mut world = World::new(SchedulerSettings { policy, sequences_running_max: 8, ..settings() });
        for i in 0..32 {
            world.add(request(i, 20, if i % 4 == 0 { 80 } else { 5 }));
        }
        world.drain();
        world
    };
    let (fixed, continuous) = (mixed(Policy::Static), mixed(Policy::Continuous));
    assert_eq!(fixed.tokens_computed, continuous.tokens_computed, "the same work");
    assert_eq!(continuous.padding_rows, 0);
    // Six of eight end after 5 of 80 tokens: 75 steps with six dead rows, four times.
    assert!(fixed.padding_rows > 4 * 6 * 70, "{}", fixed.padding_rows);
    assert!(fixed.steps > continuous.steps * 3 / 2, "{} and {} steps", fixed.steps, continuous.steps);
}

#[test]
fn only_static_scheduling_keeps_a_scratch_block() {
    let world = World::new(settings());
    assert_eq!((world.scheduler.scratch_block(), world.scheduler.kv_usage().total), (None, 256));
    let world = World::new(SchedulerSettings { policy: Policy::Static, ..settings() });
    assert_eq!(world.scheduler.scratch_block().map(|b| b.0), Some(255));
    assert_eq!(world.scheduler.kv_usage().total, 255);
}
