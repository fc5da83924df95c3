//! `HostedTools`: the tools of a request that only another service can run. The model is not offered them, and the log says so.

use std::collections::BTreeSet;

use crate::excerpt::excerpt;

/// Kinds that one line of the log names.
const KINDS_MAX: usize = 8;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct HostedTools {
    kinds: BTreeSet<String>,
}

impl HostedTools {
    /// A tool of this kind is left out.
    pub fn add(&mut self, kind: &str) {
        if self.kinds.len() < KINDS_MAX {
            self.kinds.insert(excerpt(kind).into_owned());
        }
    }

    /// Writes one line for all tools of the request that were left out.
    pub fn log(&self) {
        if !self.kinds.is_empty() {
            let kinds = self.kinds.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            tracing::info!(kinds, "tools of other services are not offered to the model");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_can_name_few_kinds_and_only_in_short() {
        let mut tools = HostedTools::default();
        (0..10_000).for_each(|number| tools.add(&(number.to_string() + &"x".repeat(10_000))));
        assert_eq!(tools.kinds.len(), KINDS_MAX);
        assert!(format!("{tools:?}").len() < KINDS_MAX * 300);
        let mut same = HostedTools::default();
        (0..10_000).for_each(|_| same.add("web_search"));
        assert_eq!(same.kinds.len(), 1);
    }
}
