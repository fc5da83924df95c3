//! `StatusReply`: what `ps` reads of a server's `/status`, and its table.

use std::fmt;
use std::time::Duration;

use indicatif::{HumanBytes, HumanDuration};
use serde::Deserialize;

/// Every field but the model and its state may be missing: the server may be another version.
#[derive(Debug, Deserialize)]
pub struct StatusReply {
    model: String,
    state: String,
    reason: Option<String>,
    progress: Option<LoadProgress>,
    context: Option<u64>,
    /// Memory that is reserved for weights and KV cache.
    memory_bytes: Option<u64>,
    /// Memory that is in RAM now.
    resident_bytes: Option<u64>,
    #[serde(default)]
    requests: RequestCounts,
    #[serde(default)]
    tokens: TokenCounts,
    #[serde(default)]
    ranks: Vec<RankReply>,
    uptime_s: Option<f64>,
}

#[derive(Debug, Deserialize)]
struct LoadProgress {
    fraction: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestCounts {
    running: u64,
    waiting: u64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenCounts {
    prompt_total: u64,
    generated_total: u64,
}

#[derive(Debug, Deserialize)]
struct RankReply {
    rank: usize,
    #[serde(default)]
    ready: bool,
    #[serde(default)]
    state: String,
    pid: Option<u32>,
    #[serde(default)]
    restarts: u64,
    #[serde(default)]
    resident_bytes: u64,
}

/// A table of one model; below it the reason why it is not ready, and its ranks.
impl fmt::Display for StatusReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.progress {
            Some(progress) => format!("{} {:.0}%", self.state, progress.fraction * 100.0),
            None => self.state.clone(),
        };
        let requests = format!("{} / {}", self.requests.running, self.requests.waiting);
        let tokens = format!("{} / {}", self.tokens.prompt_total, self.tokens.generated_total);
        write_columns(
            f,
            &[
                ("MODEL", shown(&self.model)),
                ("STATE", shown(&state)),
                ("CONTEXT", or_dash(self.context)),
                ("MEMORY", or_dash(self.resident_bytes.or(self.memory_bytes).map(HumanBytes))),
                ("RESERVED", or_dash(self.memory_bytes.map(HumanBytes))),
                ("RUNNING / WAITING", requests),
                ("TOKENS IN / OUT", tokens),
                ("UPTIME", or_dash(self.uptime_s.and_then(|s| Duration::try_from_secs_f64(s).ok()).map(HumanDuration))),
            ],
        )?;
        if let Some(reason) = &self.reason {
            writeln!(f, "{}", shown(reason))?;
        }
        for rank in &self.ranks {
            let RankReply { rank, ready, state, pid, restarts, resident_bytes } = rank;
            let state = if *ready { "ready".to_owned() } else { shown(state) };
            let (pid, memory) = (or_dash(*pid), HumanBytes(*resident_bytes));
            writeln!(f, "rank {rank}: {state}, process {pid}, {memory}, {restarts} restarts")?;
        }
        Ok(())
    }
}

/// One row under its headings. Each column is as wide as the wider of the two.
fn write_columns(f: &mut fmt::Formatter<'_>, columns: &[(&str, String)]) -> fmt::Result {
    let line = |cell: fn(&(&str, String)) -> String| {
        let cells = columns.iter().map(|column| {
            let width = column.0.chars().count().max(column.1.chars().count());
            format!("{:width$}", cell(column))
        });
        cells.collect::<Vec<_>>().join("   ")
    };
    writeln!(f, "{}", line(|column| column.0.to_owned()).trim_end())?;
    writeln!(f, "{}", line(|column| column.1.clone()).trim_end())
}

fn or_dash(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Text from the server, without control characters.
pub fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(json: &str) -> String {
        serde_json::from_str::<StatusReply>(json).unwrap().to_string()
    }

    #[test]
    fn a_model_and_its_ranks_are_a_table() {
        let text = table(
            r#"{"model": "tiny", "state": "ready", "reason": null, "progress": null, "context": 4096,
                "memory_bytes": 2147483648, "resident_bytes": 1073741824, "uptime_s": 125.5,
                "requests": {"running": 2, "waiting": 1, "finished": 7}, "tokens": {"prompt_total": 10, "generated_total": 5},
                "ranks": [{"rank": 0, "ready": true, "state": "ready", "pid": 17, "restarts": 1, "resident_bytes": 1048576}]}"#,
        );
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("MODEL   STATE   CONTEXT   MEMORY     RESERVED"), "{text}");
        assert!(lines[1].starts_with("tiny    ready   4096      1.00 GiB   2.00 GiB   2 / 1"), "{text}");
        assert!(lines[1].contains("10 / 5") && lines[1].ends_with("2 minutes"), "{text}");
        assert_eq!(lines[2], "rank 0: ready, process 17, 1.00 MiB, 1 restarts");
    }

    #[test]
    fn a_server_that_loads_says_how_far_it_is() {
        let text = table(
            r#"{"model": "m\u001b[2J", "state": "loading", "reason": "the model is loading",
                "progress": {"doing": "x", "done": 1, "total": 4, "fraction": 0.25}}"#,
        );
        assert!(text.contains("loading 25%") && text.contains("\nthe model is loading\n"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }
}
