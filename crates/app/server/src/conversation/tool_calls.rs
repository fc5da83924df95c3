//! `ToolCalls`: the calls of a conversation, to find out which one a result is of. Some APIs' results name the call, some the
//! tool, and templates may need either.

use std::collections::{HashMap, VecDeque};

#[derive(Debug, Default)]
pub struct ToolCalls {
    calls: Vec<ToolCall>,
    /// Indices of `calls`: of the last call with each id.
    by_id: HashMap<String, usize>,
    /// Indices of `calls` without a result, by the tool's name, oldest first. Some may have one by now.
    by_tool: HashMap<String, VecDeque<usize>>,
    /// All calls before this index have their results.
    first: usize,
}

#[derive(Debug)]
struct ToolCall {
    id: String,
    tool: String,
    has_result: bool,
}

impl ToolCalls {
    /// Returns the id of the call: a new one if it has none.
    pub fn add(&mut self, id: Option<String>, tool: String) -> String {
        let index = self.calls.len();
        let id = id.unwrap_or_else(|| format!("call_{index}"));
        self.by_id.insert(id.clone(), index);
        self.by_tool.entry(tool.clone()).or_default().push_back(index);
        self.calls.push(ToolCall { id: id.clone(), tool, has_result: false });
        id
    }

    /// Completes the id of a result's call and the name of its tool, as far as the calls tell.
    pub fn answer(&mut self, id: Option<String>, tool: Option<String>) -> (Option<String>, Option<String>) {
        let index = match &id {
            Some(id) => self.by_id.get(id).copied(),
            None => self.oldest(tool.as_deref()),
        };
        let Some(call) = index.map(|index| &mut self.calls[index]) else { return (id, tool) };
        call.has_result = true;
        (id.or_else(|| Some(call.id.clone())), tool.or_else(|| Some(call.tool.clone())))
    }

    /// The oldest call of this tool, or of any tool, that has no result. Each call is looked at twice at most, however many
    /// results come.
    fn oldest(&mut self, tool: Option<&str>) -> Option<usize> {
        let Some(tool) = tool else {
            let left = &self.calls[self.first..];
            self.first += left.iter().position(|call| !call.has_result).unwrap_or(left.len());
            return (self.first < self.calls.len()).then_some(self.first);
        };
        let indices = self.by_tool.get_mut(tool)?;
        std::iter::from_fn(|| indices.pop_front()).find(|&index| !self.calls[index].has_result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(calls: &mut ToolCalls, result: [Option<&str>; 2], expected: [Option<&str>; 2]) {
        let [id, tool] = result.map(|text| text.map(str::to_owned));
        let (id, tool) = calls.answer(id, tool);
        assert_eq!([id.as_deref(), tool.as_deref()], expected);
    }

    #[test]
    fn a_result_is_of_the_call_with_its_id_or_of_the_oldest_one_of_its_tool() {
        let mut calls = ToolCalls::default();
        for (id, tool) in [(None, "find"), (Some("own"), "stop"), (None, "find"), (Some("b"), "find")] {
            calls.add(id.map(str::to_owned), tool.to_owned());
        }
        check(&mut calls, [None, Some("stop")], [Some("own"), Some("stop")]);
        check(&mut calls, [Some("b"), None], [Some("b"), Some("find")]);
        check(&mut calls, [None, Some("find")], [Some("call_0"), Some("find")]);
        check(&mut calls, [None, None], [Some("call_2"), Some("find")]);
        check(&mut calls, [None, Some("find")], [None, Some("find")]);
        check(&mut calls, [None, None], [None, None]);
        check(&mut calls, [Some("x"), None], [Some("x"), None]);
        // What the client says of its result is kept.
        check(&mut calls, [Some("own"), Some("halt")], [Some("own"), Some("halt")]);
        calls.add(Some("own".to_owned()), "go".to_owned());
        check(&mut calls, [Some("own"), None], [Some("own"), Some("go")]);
    }

    /// Fails by its time: a search per result takes minutes.
    #[test]
    fn many_results_find_their_calls_in_linear_time() {
        let count = 100_000;
        let mut calls = ToolCalls::default();
        (0..count).for_each(|_| drop(calls.add(None, "f".to_owned())));
        for number in 0..count {
            let (id, tool) = match number % 4 {
                0 => (None, Some("g")),
                1 => (None, Some("f")),
                2 => (None, None),
                _ => (Some("none"), None),
            };
            calls.answer(id.map(str::to_owned), tool.map(str::to_owned));
        }
        check(&mut calls, [None, None], [Some("call_50000"), Some("f")]);
    }
}
