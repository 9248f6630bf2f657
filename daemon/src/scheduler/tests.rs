//! What a caller can do wrong, and what a step costs. How sequences fare together is simulated in `tests/`.

use super::*;
use crate::sequence::Sampling;

fn settings() -> SchedulerSettings {
    SchedulerSettings {
        policy: Policy::Continuous,
        tokens_per_step: 64,
        sequences_running_max: 4,
        prefill_chunk_max: 32,
        context_max: 256,
        kv_blocks: 32,
        prefix_cache: true,
        waiting_max: 3,
    }
}

fn request(prompt_len: usize, max_tokens: u32) -> NewSequence {
    let sampling = Sampling::greedy(max_tokens);
    NewSequence { prompt: (0..prompt_len as u32).collect(), sampling, cache_salt: 0 }
}

fn scheduler() -> Scheduler {
    Scheduler::new(settings()).unwrap()
}

/// Plans, samples token 7 wherever one is wanted, and commits.
fn step(scheduler: &mut Scheduler) -> Committed {
    let plan = scheduler.plan();
    let sampled: Vec<_> = plan.sampling().map(|id| (id, 7)).collect();
    scheduler.commit(&plan, &sampled)
}

#[test]
fn what_never_fits_is_told_at_once() {
    let mut scheduler = scheduler();
    assert_eq!(scheduler.submit(request(0, 1)), Err(SubmitError::EmptyPrompt));
    let long = SubmitError::PromptTooLong { prompt_len: 256, context_max: 256 };
    assert_eq!(scheduler.submit(request(256, 1)), Err(long));
    assert!(scheduler.drained());

    let mut small = Scheduler::new(SchedulerSettings { kv_blocks: 2, ..settings() }).unwrap();
    let needed = SubmitError::NeverFits { needed_blocks: 3, total_blocks: 2 };
    assert_eq!(small.submit(request(32, 1)), Err(needed));
    assert!(small.submit(request(32, 0)).is_ok(), "the prompt alone fits");
}

#[test]
fn the_queue_is_bounded_and_a_full_one_has_room_again() {
    let mut scheduler = scheduler();
    let ids: Vec<_> = (0..3).map(|_| scheduler.submit(request(10, 5)).unwrap()).collect();
    assert_eq!(scheduler.submit(request(10, 5)), Err(SubmitError::QueueFull { waiting_max: 3 }));
    scheduler.cancel(ids[1]).unwrap();
    assert!(scheduler.submit(request(10, 5)).is_ok());
}

#[test]
fn preempted_sequences_do_not_burst_the_bounds() {
    let mut scheduler = scheduler();
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(scheduler.submit(request(10, 50)).unwrap());
        step(&mut scheduler);
    }
    for _ in 0..3 {
        scheduler.submit(request(10, 50)).unwrap();
    }
    for &id in &ids {
        assert!(scheduler.preempt(id));
    }
    assert_eq!((scheduler.waiting_len(), scheduler.sequences_live()), (7, 7));
    assert_eq!(scheduler.submit(request(10, 5)), Err(SubmitError::QueueFull { waiting_max: 3 }));
    step(&mut scheduler);
    assert!(scheduler.running().map(|s| s.id).eq(ids), "in order of arrival");
}

#[test]
fn sequences_set_aside_do_not_burst_the_bounds() {
    let mut scheduler = scheduler();
    let mut ids = Vec::new();
    for _ in 0..7 {
        let id = scheduler.submit(request(10, 50)).unwrap();
        scheduler.pause(id);
        ids.push(id);
    }
    assert_eq!((scheduler.waiting_len(), scheduler.paused_len()), (0, 7));
    assert_eq!(scheduler.submit(request(10, 5)), Err(SubmitError::QueueFull { waiting_max: 3 }));
    ids.iter().rev().for_each(|&id| scheduler.resume(id));
    assert!(scheduler.waiting().map(|s| s.id).eq(ids), "in order of arrival");
}

#[test]
fn the_end_tells_what_was_used() {
    let mut scheduler = scheduler();
    for cached in [0, 32] {
        let id = scheduler.submit(request(40, 2)).unwrap();
        let mut ended = Vec::new();
        while scheduler.has_work() {
            ended.extend(step(&mut scheduler).ended);
        }
        assert_eq!(ended.len(), 1);
        let Ended { sequence, reason } = &ended[0];
        assert_eq!((sequence.id, *reason), (id, FinishReason::Length));
        assert_eq!((sequence.prompt_len, sequence.cached, sequence.output()), (40, cached, &[7, 7][..]));
    }
}

#[test]
fn steps_use_the_same_memory_again() {
    let mut scheduler = scheduler();
    scheduler.submit(request(10, 50)).unwrap();
    let (mut entries, mut tokens) = (std::ptr::null(), std::ptr::null());
    for i in 0..10 {
        let plan = scheduler.plan();
        let sampled: Vec<_> = plan.sampling().map(|id| (id, 7)).collect();
        let committed = scheduler.commit(&plan, &sampled);
        let now = (plan.entries.as_ptr(), committed.tokens.as_ptr());
        assert!(i == 0 || now == (entries, tokens));
        (entries, tokens) = now;
        scheduler.recycle(plan);
        scheduler.recycle_committed(committed);
    }
}

#[test]
#[should_panic(expected = "planned and not committed")]
fn nothing_changes_hands_while_a_step_is_computed() {
    let mut scheduler = scheduler();
    let id = scheduler.submit(request(10, 5)).unwrap();
    scheduler.plan();
    scheduler.cancel(id);
}

#[test]
#[should_panic(expected = "committed twice")]
fn a_plan_is_committed_once() {
    let mut scheduler = scheduler();
    scheduler.submit(request(10, 5)).unwrap();
    let plan = scheduler.plan();
    let sampled: Vec<_> = plan.sampling().map(|id| (id, 7)).collect();
    scheduler.commit(&plan, &sampled);
    scheduler.commit(&plan, &sampled);
}

#[test]
#[should_panic(expected = "a token was sampled for every entry")]
fn a_token_that_is_missing_is_noticed() {
    let mut scheduler = scheduler();
    scheduler.submit(request(10, 5)).unwrap();
    let plan = scheduler.plan();
    scheduler.commit(&plan, &[]);
}

#[test]
fn an_empty_plan_is_harmless_committed_or_not() {
    let mut scheduler = scheduler();
    assert!(scheduler.plan().is_empty());
    let plan = scheduler.plan();
    assert!(scheduler.commit(&plan, &[]).ended.is_empty());
    scheduler.submit(request(10, 1)).unwrap();
    assert_eq!(step(&mut scheduler).ended.len(), 1);
}

/// Prints what a step of 256 decodes costs: `cargo test --release -p llmd --lib planning_time -- --ignored --nocapture`.
#[test]
#[ignore = "measures time"]
fn planning_time_at_256_running() {
    let mut scheduler = Scheduler::new(SchedulerSettings {
        tokens_per_step: 512,
        sequences_running_max: 256,
        prefill_chunk_max: 256,
        context_max: 4096,
        kv_blocks: 16_384,
        waiting_max: 512,
        ..settings()
    })
    .unwrap();
    for i in 0..512 {
        let mut new = request(200, 2000);
        new.prompt[0] = i;
        scheduler.submit(new).unwrap();
    }
    let (mut times, mut sampled) = (Vec::new(), Vec::new());
    while times.len() < 1000 {
        let begun = std::time::Instant::now();
        let plan = scheduler.plan();
        let planned = begun.elapsed();
        sampled.clear();
        sampled.extend(plan.sampling().map(|id| (id, 7)));
        let begun = std::time::Instant::now();
        let committed = scheduler.commit(&plan, &sampled);
        if scheduler.running_len() == 256 && plan.entries.iter().all(|e| e.tokens == 1) {
            times.push((planned, begun.elapsed()));
        }
        scheduler.recycle(plan);
        scheduler.recycle_committed(committed);
    }
    let mut plans: Vec<_> = times.iter().map(|t| t.0).collect();
    let mut commits: Vec<_> = times.iter().map(|t| t.1).collect();
    plans.sort();
    commits.sort();
    println!(
        "plan: median {:?}, worst {:?}; commit: median {:?}, worst {:?}",
        plans[500], plans[999], commits[500], commits[999]
    );
    assert!(plans[500].as_micros() < 200);
}
