//! What a benchmark found.

use crate::screen;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// How one request went, as its client saw it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// From the time it was due to the first token, in seconds.
    pub first_token_s: Option<f64>,
    /// Between two tokens, in seconds.
    pub gaps_s: Vec<f64>,
    /// From the time it was due to its end; None if it did not get there.
    pub whole_s: Option<f64>,
    /// Tokens of the prompt, as the daemon counted them.
    pub prompt_tokens: u64,
    /// Tokens of the answer, as the daemon counted them.
    pub output_tokens: u64,
    /// Why it failed.
    pub error: Option<String>,
}

/// Two points of a distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Percentiles {
    /// Half are at or below.
    pub p50: f64,
    /// 99 of 100 are at or below.
    pub p99: f64,
}

impl Percentiles {
    /// By nearest rank: values that did occur. None without values.
    fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values.get(((part * values.len() as f64).ceil() as usize).max(1) - 1).copied();
        Some(Self { p50: at(0.50)?, p99: at(0.99)? })
    }

    fn ms(percentiles: Option<Self>) -> Value {
        percentiles.map_or(Value::Null, |p| json!({ "p50": p.p50 * 1e3, "p99": p.p99 * 1e3 }))
    }
}

/// The whole run. Tokens of failed requests are not counted.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Requests that were sent.
    pub requests: usize,
    /// Requests that failed.
    pub errors: usize,
    duration_s: f64,
    prompt_tokens: u64,
    output_tokens: u64,
    first_token: Option<Percentiles>,
    inter_token: Option<Percentiles>,
    whole: Option<Percentiles>,
}

impl Report {
    /// Sums up `outcomes` of a run of `duration_s` seconds.
    pub fn of(outcomes: &[Outcome], duration_s: f64) -> Self {
        let fine = || outcomes.iter().filter(|outcome| outcome.error.is_none());
        Self {
            requests: outcomes.len(),
            errors: outcomes.len() - fine().count(),
            duration_s,
            prompt_tokens: fine().map(|o| o.prompt_tokens).sum(),
            output_tokens: fine().map(|o| o.output_tokens).sum(),
            first_token: Percentiles::of(fine().filter_map(|o| o.first_token_s).collect()),
            inter_token: Percentiles::of(fine().flat_map(|o| o.gaps_s.iter().copied()).collect()),
            whole: Percentiles::of(fine().filter_map(|o| o.whole_s).collect()),
        }
    }

    fn per_second(&self, amount: u64) -> f64 {
        if self.duration_s > 0.0 { amount as f64 / self.duration_s } else { 0.0 }
    }

    /// As an object with stable names.
    pub fn json(&self) -> Value {
        json!({
            "requests": self.requests,
            "errors": self.errors,
            "duration_s": self.duration_s,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": self.per_second((self.requests - self.errors) as u64),
            "output_tokens_per_s": self.per_second(self.output_tokens),
            "total_tokens_per_s": self.per_second(self.prompt_tokens + self.output_tokens),
            "ttft_ms": Percentiles::ms(self.first_token),
            "inter_token_ms": Percentiles::ms(self.inter_token),
            "e2e_ms": Percentiles::ms(self.whole),
        })
    }

    /// For people; `load` says how requests were sent.
    pub fn human(&self, load: &str) -> String {
        let mut out = String::new();
        let tokens = |amount| screen::significant(self.per_second(amount));
        let _ = writeln!(
            out,
            "{} requests, {load}, {} failed, in {}",
            self.requests,
            self.errors,
            screen::seconds(self.duration_s)
        );
        let _ = writeln!(out, "  output            {:>9} tokens/s", tokens(self.output_tokens));
        let _ = writeln!(out, "  prompt + output   {:>9} tokens/s", tokens(self.prompt_tokens + self.output_tokens));
        let _ = writeln!(out, "                          p50        p99");
        for (name, percentiles) in
            [("first token", self.first_token), ("between tokens", self.inter_token), ("whole request", self.whole)]
        {
            let [p50, p99] = percentiles
                .map_or(["-".to_owned(), "-".to_owned()], |p| [screen::seconds(p.p50), screen::seconds(p.p99)]);
            let _ = writeln!(out, "  {name:<16}  {p50:>9}  {p99:>9}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes() -> Vec<Outcome> {
        let fine = |first: f64| Outcome {
            first_token_s: Some(first),
            gaps_s: vec![0.01, 0.02, 0.03],
            whole_s: Some(first + 0.06),
            prompt_tokens: 100,
            output_tokens: 4,
            error: None,
        };
        let failed =
            Outcome { error: Some("refused".into()), output_tokens: 99, first_token_s: Some(9.0), ..fine(0.0) };
        vec![fine(0.2), failed, fine(0.1), fine(0.4)]
    }

    #[test]
    fn the_names_in_json_are_stable_and_the_sums_are_right() {
        let value = Report::of(&outcomes(), 2.0).json();
        assert_eq!((&value["requests"], &value["errors"]), (&json!(4), &json!(1)));
        assert_eq!((&value["output_tokens"], &value["prompt_tokens"]), (&json!(12), &json!(300)));
        assert_eq!((&value["output_tokens_per_s"], &value["total_tokens_per_s"]), (&json!(6.0), &json!(156.0)));
        assert_eq!(value["ttft_ms"], json!({"p50": 200.0, "p99": 400.0}));
        assert_eq!(value["inter_token_ms"], json!({"p50": 20.0, "p99": 30.0}));
        assert_eq!(value["duration_s"], json!(2.0));
    }

    #[test]
    fn a_report_for_people() {
        let expected = "\
4 requests, 8 clients, 1 failed, in 2.00 s
  output                 6.00 tokens/s
  prompt + output         156 tokens/s
                          p50        p99
  first token          200 ms     400 ms
  between tokens      20.0 ms    30.0 ms
  whole request        260 ms     460 ms
";
        let shown = Report::of(&outcomes(), 2.0).human("8 clients");
        assert_eq!(shown, expected, "\n{shown}");
    }

    #[test]
    fn nothing_measured_is_null_and_a_dash() {
        let report = Report::of(&[], 0.0);
        assert_eq!(report.json()["ttft_ms"], Value::Null);
        assert_eq!(report.json()["output_tokens_per_s"], json!(0.0));
        assert!(report.human("1 clients").contains("  first token               -          -\n"));
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values = (1..=100).map(f64::from).collect();
        assert_eq!(Percentiles::of(values), Some(Percentiles { p50: 50.0, p99: 99.0 }));
        assert_eq!(Percentiles::of(vec![3.0]), Some(Percentiles { p50: 3.0, p99: 3.0 }));
        assert_eq!(Percentiles::of(vec![]), None);
    }
}
