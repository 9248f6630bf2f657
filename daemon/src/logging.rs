//! Log lines: to journald when systemd started us, to stderr otherwise, never waiting for either.
//!
//! `log::info!(session, uid; "a client connected")` formats the line on the calling thread and puts it into a bounded
//! channel; a thread of its own writes it. When that thread cannot keep up (journald stopped, a full pipe) lines are
//! dropped and counted, and the count is logged as soon as writing works again. The engine, the notifier and the watchdog do
//! not log at all.
//!
//! Prompts and outputs are never logged. What a client controls (names in errors) is shortened and stripped of control
//! characters, so it cannot forge a line.

use log::kv::{Key, Value, VisitSource};
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use systemd_journal_logger::JournalLog;

/// Most lines that wait to be written.
pub const LINES_WAITING_MAX: usize = 4096;
/// Most bytes of a message or of a field's value; the rest is cut off.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Most fields of a line; the rest is left out.
pub const FIELDS_MAX: usize = 32;
/// How long [`Logging`] waits at the end for the last lines to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Lines dropped since the start because the log could not keep up.
pub fn lines_dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// The log is on while this lives. Dropping it writes what waits, for at most a second.
#[must_use = "dropping it ends the log"]
pub struct Logging {
    lines: SyncSender<Entry>,
    writer: Option<JoinHandle<()>>,
}

/// Switches logging on for the process: journald if stderr is connected to it, stderr otherwise.
pub fn init(level: LevelFilter) -> io::Result<Logging> {
    let sink = if systemd_journal_logger::connected_to_journal() {
        Sink::Journal(JournalLog::new()?)
    } else {
        Sink::Text(Box::new(io::stderr()))
    };
    let (logger, logging) = start(sink, level, LINES_WAITING_MAX, &DROPPED)?;
    log::set_boxed_logger(Box::new(logger)).map_err(io::Error::other)?;
    log::set_max_level(level);
    Ok(logging)
}

impl Logging {
    /// Waits until every line logged so far is written, or a second has passed; says which.
    pub fn flush(&self) -> bool {
        let (done, written) = sync_channel(1);
        let deadline = std::time::Instant::now() + FLUSH_TIMEOUT;
        let mut entry = Entry::Flush(done);
        // `send` would wait for ever on a writer that hangs, so a full channel is tried again until the time is up.
        while let Err(e) = self.lines.try_send(entry) {
            entry = match e {
                std::sync::mpsc::TrySendError::Full(entry) if std::time::Instant::now() < deadline => entry,
                _ => return false,
            };
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        !matches!(written.recv_timeout(left), Err(RecvTimeoutError::Timeout))
    }
}

impl Drop for Logging {
    fn drop(&mut self) {
        // The writer is joined only if it is alive and well; one that hangs in a write goes with the process.
        if self.flush()
            && self.lines.try_send(Entry::End).is_ok()
            && let Some(writer) = self.writer.take()
        {
            let _ = writer.join();
        }
    }
}

/// Where lines go.
enum Sink {
    Journal(JournalLog),
    Text(Box<dyn Write + Send>),
}

enum Entry {
    Line(Line),
    Flush(SyncSender<()>),
    End,
}

/// A record that owns its text.
#[derive(Debug, Clone, PartialEq)]
struct Line {
    time: SystemTime,
    level: Level,
    target: String,
    message: String,
    fields: Vec<(String, String)>,
}

struct Logger {
    level: LevelFilter,
    lines: SyncSender<Entry>,
    dropped: &'static AtomicU64,
}

fn start(
    sink: Sink,
    level: LevelFilter,
    waiting_max: usize,
    dropped: &'static AtomicU64,
) -> io::Result<(Logger, Logging)> {
    let (sender, receiver) = sync_channel(waiting_max);
    let writer =
        std::thread::Builder::new().name("llmd-log".into()).spawn(move || write_lines(receiver, sink, dropped))?;
    Ok((Logger { level, lines: sender.clone(), dropped }, Logging { lines: sender, writer: Some(writer) }))
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= self.level
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let mut fields = Fields(Vec::new());
        // A value that cannot be shown is left out; the line itself is worth more.
        let _ = record.key_values().visit(&mut fields);
        let line = Line {
            time: SystemTime::now(),
            level: record.level(),
            target: record.target().to_owned(),
            message: clean(*record.args()),
            fields: fields.0,
        };
        if self.lines.try_send(Entry::Line(line)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

struct Fields(Vec<(String, String)>);

impl<'kvs> VisitSource<'kvs> for Fields {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), log::kv::Error> {
        if self.0.len() < FIELDS_MAX {
            self.0.push((key.as_str().to_owned(), clean(value)));
        }
        Ok(())
    }
}

/// The text of `value`, at most [`TEXT_BYTES_MAX`] bytes, with control characters written as Rust escapes them.
fn clean(value: impl std::fmt::Display) -> String {
    struct Clean(String);
    impl std::fmt::Write for Clean {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            for c in text.chars() {
                if self.0.len() >= TEXT_BYTES_MAX {
                    // Ends the formatting as well: a value without end is not walked to its end.
                    return Err(std::fmt::Error);
                }
                if c.is_control() { self.0.extend(c.escape_default()) } else { self.0.push(c) }
            }
            Ok(())
        }
    }
    let mut out = Clean(String::new());
    if write!(out, "{value}").is_err() {
        out.0.push('…');
    }
    out.0
}

fn write_lines(lines: Receiver<Entry>, mut sink: Sink, dropped: &AtomicU64) {
    let mut reported = 0;
    for entry in lines {
        match entry {
            Entry::Line(line) => sink.write(&line),
            Entry::Flush(done) => {
                sink.flush();
                let _ = done.send(());
            }
            Entry::End => break,
        }
        let now = dropped.load(Ordering::Relaxed);
        if now != reported {
            sink.write(&Line {
                time: SystemTime::now(),
                level: Level::Warn,
                target: module_path!().to_owned(),
                message: format!("{} log lines were dropped: the log could not keep up", now - reported),
                fields: vec![("dropped".to_owned(), (now - reported).to_string())],
            });
            reported = now;
        }
    }
    sink.flush();
}

impl Sink {
    /// Writes a line; one that cannot be written is lost, as there is nowhere to say so.
    fn write(&mut self, line: &Line) {
        match self {
            Self::Journal(journal) => {
                let fields: Vec<(String, &str)> =
                    line.fields.iter().map(|(key, value)| (journal_field(key), value.as_str())).collect();
                let fields = fields.as_slice();
                let mut record = Record::builder();
                record.level(line.level).target(&line.target).key_values(&fields);
                let _ = journal.journal_send(&record.args(format_args!("{}", line.message)).build());
            }
            Self::Text(stream) => {
                let _ = stream.write_all(text(line).as_bytes());
            }
        }
    }

    fn flush(&mut self) {
        if let Self::Text(stream) = self {
            let _ = stream.flush();
        }
    }
}

/// Fields of our own start with LLMD_, and journald wants capitals; a key in capitals is one of journald's own (MESSAGE_ID)
/// and stays.
fn journal_field(key: &str) -> String {
    let own = key.chars().any(|c| c.is_lowercase());
    if own { format!("LLMD_{}", key.to_uppercase()) } else { key.to_owned() }
}

/// One line for people: time in UTC, level, message, fields.
fn text(line: &Line) -> String {
    let mut out = format!("{} {:5} {}", utc(line.time), line.level, line.message);
    for (key, value) in &line.fields {
        let plain = !value.is_empty() && !value.contains([' ', '"', '=']);
        let written = if plain { write!(out, " {key}={value}") } else { write!(out, " {key}={value:?}") };
        written.expect("a String takes everything");
    }
    out.push('\n');
    out
}

/// "2026-03-01T12:34:56.789Z".
fn utc(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86400, since.as_secs() % 86400);
    // Days to a date in the proleptic Gregorian calendar, counted from 1 March 0000 so that the leap day comes last
    // (Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days).
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Condvar, Mutex};

    /// A stream that keeps what is written, and blocks while its gate is shut.
    #[derive(Clone, Default)]
    struct Gated(Arc<(Mutex<(bool, String)>, Condvar)>);

    impl Gated {
        fn shut(&self, shut: bool) {
            self.0.0.lock().unwrap().0 = shut;
            self.0.1.notify_all();
        }
        fn written(&self) -> String {
            self.0.0.lock().unwrap().1.clone()
        }
    }

    impl Write for Gated {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut state = self.0.1.wait_while(self.0.0.lock().unwrap(), |state| state.0).unwrap();
            state.1.push_str(std::str::from_utf8(bytes).unwrap());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn log(logger: &Logger, level: Level, message: &str, fields: &[(&str, &str)]) {
        let mut record = Record::builder();
        record.level(level).target("llmd::test").key_values(&fields);
        logger.log(&record.args(format_args!("{message}")).build());
    }

    fn counter() -> &'static AtomicU64 {
        Box::leak(Box::new(AtomicU64::new(0)))
    }

    #[test]
    fn a_line_has_time_level_message_and_fields() {
        let stream = Gated::default();
        let sink = Sink::Text(Box::new(stream.clone()));
        let (logger, logging) = start(sink, LevelFilter::Info, 16, counter()).unwrap();
        log(&logger, Level::Info, "a client connected", &[("uid", "1000"), ("unit", "my app.service")]);
        log(&logger, Level::Debug, "too quiet to be heard", &[]);
        drop(logging);
        let written = stream.written();
        let (time, rest) = written.split_once(' ').unwrap();
        assert!(time.len() == 24 && time.starts_with("20") && time.ends_with('Z'), "{time}");
        assert_eq!(rest, "INFO  a client connected uid=1000 unit=\"my app.service\"\n");
    }

    #[test]
    fn a_line_cannot_be_forged_and_has_an_end() {
        let stream = Gated::default();
        let sink = Sink::Text(Box::new(stream.clone()));
        let (logger, logging) = start(sink, LevelFilter::Info, 16, counter()).unwrap();
        log(&logger, Level::Warn, "bad name x\n2026-01-01 ERROR all is lost\u{1b}[31m", &[("name", "a\nb")]);
        log(&logger, Level::Warn, &"é".repeat(TEXT_BYTES_MAX), &[]);
        drop(logging);
        let written = stream.written();
        let lines: Vec<&str> = written.lines().collect();
        assert_eq!(lines.len(), 2, "{written}");
        assert!(lines[0].contains("x\\n2026-01-01") && lines[0].contains("\\u{1b}[31m"), "{}", lines[0]);
        assert!(lines[1].len() < TEXT_BYTES_MAX + 64 && lines[1].ends_with('…'));
    }

    #[test]
    fn a_log_that_hangs_stops_nobody_and_tells_afterwards() {
        let stream = Gated::default();
        let dropped = counter();
        let sink = Sink::Text(Box::new(stream.clone()));
        let (logger, logging) = start(sink, LevelFilter::Info, 4, dropped).unwrap();
        stream.shut(true);
        // One line may be in the writer's hands, four wait; of 100 at least 95 are lost and none blocks.
        (0..100).for_each(|i| log(&logger, Level::Info, &format!("line {i}"), &[]));
        let lost = dropped.load(Ordering::Relaxed);
        assert!((95..=96).contains(&lost), "{lost}");
        stream.shut(false);
        drop(logging);
        let written = stream.written();
        assert!(written.contains("line 0\n") && written.contains("line 3\n"), "{written}");
        assert!(written.contains(&format!("WARN  {lost} log lines were dropped")), "{written}");
    }

    #[test]
    fn the_end_does_not_wait_for_a_log_that_hangs() {
        let stream = Gated::default();
        let sink = Sink::Text(Box::new(stream.clone()));
        let (logger, logging) = start(sink, LevelFilter::Info, 4, counter()).unwrap();
        stream.shut(true);
        (0..10).for_each(|_| log(&logger, Level::Info, "x", &[]));
        let began = std::time::Instant::now();
        drop(logging);
        assert!(began.elapsed() < FLUSH_TIMEOUT * 3);
        stream.shut(false);
    }

    #[test]
    fn times_are_dates() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_827_696, "2000-02-29T12:34:56.000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000Z"),
            (1_735_689_600, "2025-01-01T00:00:00.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
    }

    /// Run as a service: `systemd-run --wait TEST-BINARY --ignored --exact logging::tests::a_line_reaches_the_journal`.
    #[test]
    #[ignore = "needs a journald, and to be started by systemd"]
    fn a_line_reaches_the_journal() {
        assert!(systemd_journal_logger::connected_to_journal(), "not started by systemd");
        let marker = format!("marker {}", std::process::id());
        let logging = init(LevelFilter::Info).unwrap();
        log::warn!(uid = 1000, unit = "my app.service", MESSAGE_ID = "0123456789abcdef0123456789abcdef"; "{marker}");
        drop(logging);
        let line = (0..50)
            .find_map(|_| {
                std::thread::sleep(Duration::from_millis(100));
                let out = std::process::Command::new("journalctl").args(["-o", "json", "--no-pager"]).output().unwrap();
                let lines = String::from_utf8(out.stdout).unwrap();
                lines.lines().find(|line| line.contains(&marker)).map(str::to_owned)
            })
            .expect("the line is in the journal");
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&line["MESSAGE"], &line["PRIORITY"]), (&marker.into(), &"4".into()));
        assert_eq!(line["MESSAGE_ID"], "0123456789abcdef0123456789abcdef");
        assert_eq!((&line["LLMD_UID"], &line["LLMD_UNIT"]), (&"1000".into(), &"my app.service".into()));
    }
}
