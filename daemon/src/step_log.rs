//! A record of every step, one JSON object a line, for people who ask what was computed when (`--step-log PATH`).
//!
//! The engine only formats into a bounded channel; a thread writes. Lines that find the channel full are counted and
//! the count stands in the next line that gets through, so a gap is never silent.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;

use crate::plan::StepPlan;
use crate::sequence::SequenceId;

/// Lines the writer may lag behind before lines are dropped.
const BACKLOG_LINES: usize = 4096;

/// One line of the log.
#[derive(Debug, Serialize)]
struct Line {
    step: u64,
    seconds: f64,
    tokens: usize,
    padding_rows: u32,
    waiting: usize,
    dropped_before: u64,
    entries: Vec<Entry>,
    admitted: Vec<String>,
    preempted: Vec<String>,
    finished: Vec<String>,
}

/// One sequence's part of a step.
#[derive(Debug, Serialize)]
struct Entry {
    sequence: String,
    start: u32,
    tokens: u32,
    samples: bool,
}

fn name(id: SequenceId) -> String {
    format!("{}.{}", id.index, id.generation)
}

/// The engine's end of the log.
pub struct StepLog {
    sender: mpsc::SyncSender<Line>,
    dropped: u64,
}

impl StepLog {
    /// Creates (or truncates) the file and starts the writer, which ends when the `StepLog` is dropped.
    pub fn create(path: &Path) -> io::Result<(Self, JoinHandle<()>)> {
        let mut file = BufWriter::new(File::create(path)?);
        let (sender, receiver) = mpsc::sync_channel::<Line>(BACKLOG_LINES);
        let thread = std::thread::Builder::new().name("llmd-step-log".into()).spawn(move || {
            while let Ok(line) = receiver.recv() {
                if let Err(error) = serde_json::to_writer(&mut file, &line)
                    .map_err(io::Error::from)
                    .and_then(|()| file.write_all(b"\n"))
                    .and_then(|()| file.flush())
                {
                    log::error!("step log ends here: {error}");
                    return;
                }
            }
        })?;
        Ok((Self { sender, dropped: 0 }, thread))
    }

    /// Records a step that took `elapsed`, after which `waiting` still queued. `finished` are those that have ended since
    /// the step before, with this one or by a client's wish before it was planned.
    pub fn record(&mut self, plan: &StepPlan, elapsed: Duration, waiting: usize, finished: &[SequenceId]) {
        let line = Line {
            step: plan.step,
            seconds: elapsed.as_secs_f64(),
            tokens: plan.tokens(),
            padding_rows: plan.padding_rows,
            waiting,
            dropped_before: self.dropped,
            entries: plan
                .entries
                .iter()
                .map(|e| Entry { sequence: name(e.sequence), start: e.start, tokens: e.tokens, samples: e.samples })
                .collect(),
            admitted: plan.admitted.iter().copied().map(name).collect(),
            preempted: plan.preempted.iter().copied().map(name).collect(),
            finished: finished.iter().copied().map(name).collect(),
        };
        match self.sender.try_send(line) {
            Ok(()) => self.dropped = 0,
            Err(_) => self.dropped += 1,
        }
    }
}
