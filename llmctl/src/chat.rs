//! `llmctl chat`: a conversation, line by line.
//!
//! On a terminal there is a prompt, and Ctrl-C stops the answer under way (or, while nothing is generated, the program). Piped in, each
//! line is one turn and only answers are printed.

use crate::failure::{FAILED, Failure, REFUSED};
use crate::generate::{Sampling, stream};
use crate::{Common, place, screen};
use llmd_client::{Canceller, ChatMessage, Client, FinishReason, GenerateRequest, Prompt};
use std::io::{BufRead, IsTerminal, Read, Write};
use std::sync::Mutex;
use std::time::Instant;

/// Most bytes of one line.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// What a shell reports for a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

const HELP: &str = "\
Write a line and press Enter. Ctrl-C stops an answer, Ctrl-D or /exit ends.
  /clear   forget the conversation
  /help    this text
";

/// What `chat` takes.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Instructions that stand before the conversation, in the role "system"
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: Sampling,
}

/// What Ctrl-C cancels: the answer under way. None: it ends the program.
static UNDER_WAY: Mutex<Option<Canceller>> = Mutex::new(None);

fn on_interrupt() {
    // Taken, so that a second Ctrl-C ends the program even if the daemon does not end the answer.
    match UNDER_WAY.lock().ok().and_then(|mut under_way| under_way.take()) {
        Some(answer) => answer.cancel(),
        None => std::process::exit(INTERRUPTED),
    }
}

fn set_under_way(canceller: Option<Canceller>) {
    if let Ok(mut under_way) = UNDER_WAY.lock() {
        *under_way = canceller;
    }
}

/// Talks until the input ends.
pub fn run(common: &Common, arguments: &Arguments) -> Result<(), Failure> {
    let client = place::connect(common)?;
    ctrlc::set_handler(on_interrupt).map_err(|e| Failure::new(FAILED, format!("cannot take Ctrl-C: {e}")))?;
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let mut input = std::io::stdin().lock();
    let mut out = std::io::stdout().lock();
    let mut conversation = Conversation::new(arguments.system.as_deref());
    if terminal && !common.json {
        out.write_all(HELP.as_bytes())?;
    }
    loop {
        if terminal && !common.json {
            write!(out, "\n> ")?;
            out.flush()?;
        }
        let Some(line) = read_line(&mut input)? else { break };
        match Turn::of(&line) {
            Turn::Nothing => {}
            Turn::End => break,
            Turn::Clear => conversation = Conversation::new(arguments.system.as_deref()),
            Turn::Help => out.write_all(HELP.as_bytes())?,
            Turn::Unknown(word) => eprintln!("llmctl: there is no {}; /help lists what there is", screen::plain(word)),
            Turn::Say(text) => {
                conversation.say("user", text);
                match answer(common, &client, arguments, &conversation, terminal, &mut out) {
                    Ok(text) => conversation.say("assistant", &text),
                    // A refusal concerns this turn: the conversation goes on without it, where a person can decide.
                    Err(failure) if terminal && failure.code == REFUSED => {
                        conversation.take_back();
                        eprintln!("llmctl: {}", failure.message);
                        eprintln!("        {}; or /clear", failure.hint.unwrap_or_default());
                    }
                    Err(failure) => return Err(failure),
                }
            }
        }
    }
    if terminal && !common.json {
        writeln!(out)?;
    }
    Ok(out.flush()?)
}

fn answer(
    common: &Common,
    client: &Client,
    arguments: &Arguments,
    conversation: &Conversation,
    terminal: bool,
    out: &mut impl Write,
) -> Result<String, Failure> {
    let request =
        GenerateRequest { prompt: Prompt::Chat(conversation.0.clone()), sampling: (&arguments.sampling).into() };
    let began = Instant::now();
    let generation = client.generate(&request)?;
    set_under_way(Some(generation.canceller()));
    let answer = stream(generation, began, |text| {
        if !common.json {
            let text = if terminal { screen::streamed(text) } else { text.to_owned() };
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    });
    set_under_way(None);
    let answer = answer?;
    if common.json {
        writeln!(out, "{}", answer.json())?;
    } else {
        let note = match answer.reason {
            FinishReason::Stop | FinishReason::StopString => String::new(),
            other if terminal => format!(" [{}]", other.name()),
            _ => String::new(),
        };
        writeln!(out, "{note}")?;
    }
    out.flush()?;
    Ok(answer.text)
}

/// What was said so far.
#[derive(Debug, PartialEq)]
struct Conversation(Vec<ChatMessage>);

impl Conversation {
    fn new(system: Option<&str>) -> Self {
        let mut conversation = Self(Vec::new());
        if let Some(text) = system {
            conversation.say("system", text);
        }
        conversation
    }

    fn say(&mut self, role: &str, content: &str) {
        self.0.push(ChatMessage { role: role.to_owned(), content: content.to_owned() });
    }

    fn take_back(&mut self) {
        self.0.pop();
    }
}

/// What a line means.
#[derive(Debug, PartialEq)]
enum Turn<'a> {
    Nothing,
    Say(&'a str),
    Clear,
    Help,
    End,
    Unknown(&'a str),
}

impl<'a> Turn<'a> {
    fn of(line: &'a str) -> Self {
        match line.trim() {
            "" => Self::Nothing,
            "/exit" | "/quit" => Self::End,
            "/clear" => Self::Clear,
            "/help" => Self::Help,
            // A path or a fraction is something to say; a single word after a slash is a slip.
            text if text.starts_with('/') && text[1..].chars().all(char::is_alphabetic) => Self::Unknown(text),
            text => Self::Say(text),
        }
    }
}

/// The next line, or None at the end.
fn read_line(input: &mut impl BufRead) -> Result<Option<String>, Failure> {
    let mut line = String::new();
    let read = input
        .take(LINE_BYTES_MAX)
        .read_line(&mut line)
        .map_err(|e| Failure::new(FAILED, format!("cannot read from standard input: {e}")))?;
    if read as u64 == LINE_BYTES_MAX {
        return Err(Failure::new(FAILED, format!("a line is longer than {LINE_BYTES_MAX} bytes")));
    }
    Ok((read > 0).then_some(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_turns_or_commands() {
        assert_eq!(Turn::of("  \n"), Turn::Nothing);
        assert_eq!(Turn::of("/exit\n"), Turn::End);
        assert_eq!(Turn::of("/clear"), Turn::Clear);
        assert_eq!(Turn::of("/hlep"), Turn::Unknown("/hlep"));
        assert_eq!(Turn::of("/etc/passwd is what?"), Turn::Say("/etc/passwd is what?"));
        assert_eq!(Turn::of(" Hello \r\n"), Turn::Say("Hello"));
    }

    #[test]
    fn input_ends_and_long_lines_are_refused() {
        let mut input = "one\ntwo".as_bytes();
        assert_eq!(read_line(&mut input).unwrap().as_deref(), Some("one\n"));
        assert_eq!(read_line(&mut input).unwrap().as_deref(), Some("two"));
        assert_eq!(read_line(&mut input).unwrap(), None);
        let long = "x".repeat(LINE_BYTES_MAX as usize);
        assert!(read_line(&mut long.as_bytes()).is_err());
    }

    #[test]
    fn a_refused_turn_is_taken_back() {
        let mut conversation = Conversation::new(Some("be brief"));
        conversation.say("user", "hello");
        conversation.take_back();
        assert_eq!(conversation, Conversation::new(Some("be brief")));
        assert_eq!(conversation.0[0].role, "system");
    }
}
