//! Detects what a chat template supports, by rendering probe messages, and adapts conversations to it.
//!
//! Templates differ: some need content as text and some as parts, some have no system prompt, few support the `developer`
//! role, many support no tools, and those that do need arguments as an object or as text.

use crate::hermes;
use crate::message::{Content, Message, with_parsed_arguments};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TemplateCapabilities {
    content: ContentFormat,
    supports_system: bool,
    /// Instructions may follow other messages.
    supports_late_system: bool,
    /// Wherever it supports `system`: one that shows a developer's message only in some places would lose the others.
    supports_developer: bool,
    /// Messages of one role may follow each other. Templates with strict turns refuse that.
    supports_repeated_roles: bool,
    pub shows_tools: bool,
    arguments: ArgumentsFormat,
    /// Ids of tool calls must be nine letters and digits. Mistral's templates check this.
    short_ids: bool,
    /// A message may contain several tool calls. Llama's templates refuse that.
    supports_parallel_calls: bool,
}

impl Default for TemplateCapabilities {
    /// Passes messages on unchanged, and writes tools into the system prompt.
    fn default() -> Self {
        Self {
            content: ContentFormat::TextOrParts,
            supports_system: true,
            supports_late_system: true,
            supports_developer: false,
            supports_repeated_roles: true,
            shows_tools: false,
            arguments: ArgumentsFormat::Object,
            short_ids: false,
            supports_parallel_calls: true,
        }
    }
}

/// The format of a message's content that the template supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentFormat {
    TextOrParts,
    TextOnly,
    PartsOnly,
}

/// The format of a tool call's arguments that the template supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentsFormat {
    Object,
    Text,
}

const NEEDLE: &str = "b7f3needle";
const SHORT_ID: &str = "a1b2c3d4e";
const LONG_ID: &str = "call_0123456789abcdef";

impl TemplateCapabilities {
    /// `render` returns the text of messages and tools, or `None` if the template fails.
    pub fn probe(source: &str, render: impl Fn(Vec<Value>, Vec<Value>) -> Option<String>) -> Self {
        let shows =
            |messages: Vec<Value>, tools: Vec<Value>| render(messages, tools).is_some_and(|text| text.contains(NEEDLE));
        let user = |content: Value| json!({"role": "user", "content": content});
        let shows_content = |content: Value| {
            let text = render(vec![user(content)], Vec::new());
            // A template that prints the list of parts as it is also shows the needle, together with its key.
            text.is_some_and(|text| text.contains(NEEDLE) && !text.contains("\"text\"") && !text.contains("'text'"))
        };
        let text = shows_content(json!(NEEDLE));
        let parts = shows_content(json!([{"type": "text", "text": NEEDLE}]));
        let content = match (text, parts) {
            (true, false) => ContentFormat::TextOnly,
            (false, true) => ContentFormat::PartsOnly,
            (true, true) => ContentFormat::TextOrParts,
            // The template cannot render a single message, so nothing can be detected.
            (false, false) => return Self::default(),
        };
        let say = |role: &str, text: &str| content.convert(&Message::new(role, text)).to_json();
        let first = |role: &str| shows(vec![say(role, NEEDLE), say("user", "hi")], Vec::new());
        let tool = json!({"type": "function", "function": {
            "name": NEEDLE, "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        }});
        let supports_system = first("system");
        let shows_tools = shows(vec![say("user", "hi")], vec![tool.clone()])
            || (supports_system && shows(vec![say("system", "s"), say("user", "hi")], vec![tool]));
        let shows_calls = |arguments: &Value, id: &str, count: usize| {
            let call = json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
            let mut assistant = say("assistant", "");
            assistant["tool_calls"] = Value::Array(vec![call; count]);
            shows(vec![say("user", "hi"), assistant], Vec::new())
        };
        let (object, written) = (json!({NEEDLE: 1}), json!(json!({NEEDLE: 1}).to_string()));
        let (arguments, shown) = match [LONG_ID, SHORT_ID].iter().any(|id| shows_calls(&object, id, 1)) {
            false if shows_calls(&written, SHORT_ID, 1) => (ArgumentsFormat::Text, written),
            _ => (ArgumentsFormat::Object, object),
        };
        let is_late = |role: &str| shows(vec![say("user", "hi"), say(role, NEEDLE)], Vec::new());
        let supports_late_system = is_late("system");
        let supports_developer = source.contains("developer")
            && first("developer")
            && (!supports_system
                || shows(vec![say("system", "s"), say("developer", NEEDLE), say("user", "hi")], Vec::new()))
            && (!supports_late_system || is_late("developer"));
        let short_ids = !shows_calls(&shown, LONG_ID, 1) && shows_calls(&shown, SHORT_ID, 1);
        Self {
            content,
            supports_system,
            supports_late_system,
            supports_developer,
            supports_repeated_roles: is_late("user"),
            shows_tools,
            arguments,
            short_ids,
            supports_parallel_calls: !shows_calls(&shown, SHORT_ID, 1) || shows_calls(&shown, SHORT_ID, 2),
        }
    }

    /// The messages and tools to pass to the template.
    pub fn adapt<'t>(&self, messages: &[Message], tools: &'t [Value]) -> (Vec<Value>, &'t [Value]) {
        let mut messages = Cow::Borrowed(messages);
        let mut shown = tools;
        if !self.shows_tools {
            messages = Cow::Owned(hermes::with_tools_as_text(&messages));
            shown = &[];
            if !tools.is_empty() {
                messages.to_mut().insert(0, Message::new("system", hermes::tools_prompt(tools)));
            }
        }
        if !self.supports_parallel_calls {
            messages = Cow::Owned(one_call_each(&messages));
        }
        let mut messages = self.merge_system_messages(messages.into_owned());
        if !self.supports_late_system {
            messages = merge_late_instructions(messages);
        }
        if !self.supports_repeated_roles {
            messages = merge_repeated_roles(messages);
        }
        let messages = messages.iter().map(|message| self.adapt_calls(self.content.convert(message).to_json()));
        (messages.collect(), shown)
    }

    /// Merges the leading instructions into one system message; without a system role, into the first user message.
    fn merge_system_messages(&self, mut messages: Vec<Message>) -> Vec<Message> {
        if !self.supports_developer {
            messages
                .iter_mut()
                .filter(|message| message.role == "developer")
                .for_each(|m| m.role = "system".to_owned());
        }
        let leading = messages.iter().take_while(|message| message.role == "system").count();
        if leading == 0 || (leading == 1 && self.supports_system) {
            return messages;
        }
        let instructions: Vec<String> = messages.drain(..leading).map(|message| message.text()).collect();
        let instructions = instructions.join("\n\n");
        match messages.first_mut() {
            Some(first) if !self.supports_system && first.role == "user" => first.prepend(&instructions),
            _ => {
                let role = if self.supports_system { "system" } else { "user" };
                messages.insert(0, Message::new(role, instructions));
            }
        }
        messages
    }

    /// Converts the arguments and ids of tool calls and tool results to the template's format.
    fn adapt_calls(&self, message: Value) -> Value {
        let mut message = with_parsed_arguments(message);
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            if self.arguments == ArgumentsFormat::Text
                && let Some(arguments) = call.pointer_mut("/function/arguments").filter(|value| value.is_object())
            {
                *arguments = json!(arguments.to_string());
            }
            self.shorten(call.get_mut("id"));
        }
        self.shorten(message.get_mut("tool_call_id"));
        message
    }

    fn shorten(&self, id: Option<&mut Value>) {
        let is_short = |id: &str| id.len() == SHORT_ID.len() && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if let Some(Value::String(id)) = id.filter(|_| self.short_ids)
            && !is_short(id)
        {
            let mut hasher = DefaultHasher::new();
            id.hash(&mut hasher);
            *id = format!("{:09x}", hasher.finish() & 0xf_ffff_ffff);
        }
    }
}

/// Instructions that follow other messages become text of the user, in one message with what the user says next to them.
fn merge_late_instructions(messages: Vec<Message>) -> Vec<Message> {
    let mut merged: Vec<Message> = Vec::with_capacity(messages.len());
    let (mut has_turns, mut was_late) = (false, false);
    for mut message in messages {
        let instructs = ["system", "developer"].contains(&message.role.as_str());
        let is_late = instructs && has_turns;
        has_turns |= !instructs;
        if is_late {
            message.role = "user".to_owned();
        }
        match merged.last_mut() {
            Some(last) if last.role == "user" && message.role == "user" && (is_late || was_late) => {
                last.append(message);
            }
            _ => merged.push(message),
        }
        was_late = is_late;
    }
    merged
}

/// What one role says in several messages becomes one message. Only the last of them may call tools.
fn merge_repeated_roles(messages: Vec<Message>) -> Vec<Message> {
    let mut merged: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        match merged.last_mut() {
            Some(last)
                if last.role == message.role
                    && ["user", "assistant"].contains(&message.role.as_str())
                    && !last.extra.contains_key("tool_calls") =>
            {
                last.append(message);
            }
            _ => merged.push(message),
        }
    }
    merged
}

/// Splits parallel tool calls into one message per call, each followed by its results. Only the first has the content and
/// the extra values of the message.
fn one_call_each(messages: &[Message]) -> Vec<Message> {
    let mut single: Vec<Message> = Vec::with_capacity(messages.len());
    let mut rest = messages;
    while let Some((message, after)) = rest.split_first() {
        rest = after;
        let calls = message.extra.get("tool_calls").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if calls.len() < 2 {
            single.push(message.clone());
            continue;
        }
        let results;
        (results, rest) = after.split_at(after.iter().take_while(|message| message.role == "tool").count());
        let mut results_by_id: HashMap<Option<&str>, Vec<&Message>> = HashMap::new();
        for result in results {
            results_by_id.entry(result.extra.get("tool_call_id").and_then(Value::as_str)).or_default().push(result);
        }
        for (index, call) in calls.iter().enumerate() {
            let mut one = match index {
                0 => message.clone(),
                _ => Message { role: message.role.clone(), ..Message::default() },
            };
            one.extra.insert("tool_calls".to_owned(), json!([call]));
            single.push(one);
            let found = results_by_id.remove(&call.get("id").and_then(Value::as_str));
            single.extend(found.into_iter().flatten().cloned());
        }
    }
    single
}

impl ContentFormat {
    fn convert(self, message: &Message) -> Message {
        // Templates concatenate content or check whether it is empty: neither works with null.
        let message = match &message.content {
            Content::None => Message { content: Content::Text(String::new()), ..message.clone() },
            _ => message.clone(),
        };
        match self {
            Self::TextOrParts => message,
            Self::TextOnly => message.with_text_content(),
            Self::PartsOnly => message.with_parts_content(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{ChatTemplate, Content, Message, RenderOptions};
    use serde_json::{Value, json};

    /// Renders messages and nothing else.
    const PLAIN: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    /// Supports tools; needs arguments as text and ids of nine characters.
    const STRICT: &str = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
        {% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}\
        ({{ c.id + c.function.arguments }}){% endfor %}\
        {% if m.role == 'tool' %}{{ '=' + m.tool_call_id }}{% endif %}{% endfor %}";
    /// Has no system prompt.
    const NO_SYSTEM: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
        [{{ m.role }}]{{ m.content }}{% endfor %}";

    fn render(source: &str, messages: &[Message], tools: &[Value]) -> String {
        let options = RenderOptions { tools: tools.to_vec(), ..RenderOptions::default() };
        ChatTemplate::new(source, "", "").unwrap().render(messages, &options).unwrap()
    }

    fn say(role: &str, text: &str) -> Message {
        Message::new(role, text)
    }

    fn called(id: &str) -> Message {
        let call = json!([{"id": id, "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]);
        let mut message = Message { content: Content::None, ..say("assistant", "") };
        message.extra.insert("tool_calls".to_owned(), call);
        message
    }

    fn result(id: &str) -> Message {
        let mut message = say("tool", "r");
        message.extra.insert("tool_call_id".to_owned(), json!(id));
        message
    }

    #[test]
    fn tools_are_explained_where_the_template_knows_none() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let messages = [say("system", "be kind"), say("user", "hi"), called("a"), result("a")];
        let text = render(PLAIN, &messages, std::slice::from_ref(&tool));
        assert!(text.starts_with("[system]# Tools"), "{text}");
        assert!(
            text.contains(&tool.to_string()) && text.contains("\n\nbe kind[user]hi[assistant]<tool_call>"),
            "{text}"
        );
        assert!(text.ends_with("</tool_call>[user]<tool_response>\nr\n</tool_response>"), "{text}");
        assert_eq!(render(PLAIN, &messages[..2], &[]), "[system]be kind[user]hi");
    }

    #[test]
    fn a_template_that_knows_tools_is_given_them() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(render(STRICT, &[say("user", "hi")], &[tool]), "<f>[user]hi");
    }

    #[test]
    fn arguments_and_ids_take_the_form_that_the_template_wants() {
        let exact = render(STRICT, &[say("user", "hi"), called("abcdefgh9"), result("abcdefgh9")], &[]);
        assert_eq!(exact, r#"[user]hi[assistant](abcdefgh9{"x":1})[tool]r=abcdefgh9"#);
        let long = render(STRICT, &[say("user", "hi"), called("call_123"), result("call_123")], &[]);
        let id = long.rsplit('=').next().unwrap();
        assert!(id.len() == 9 && long.contains(&format!("({id}{{")), "{long}");
    }

    #[test]
    fn calls_made_together_are_told_one_by_one_where_they_must_be() {
        let single = "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}\
            {{ m.content }}({{ m.tool_calls[0].id }}{{ m.tool_calls[0].function.arguments|tojson }}){% else %}[{{ m.content }}]{% endif %}\
            {% endfor %}{{ tools or '' }}";
        let mut both = Message { content: Content::Text("see".to_owned()), ..called("a") };
        let second = called("b").extra["tool_calls"][0].clone();
        both.extra["tool_calls"].as_array_mut().unwrap().push(second);
        let messages = [say("user", "hi"), both, result("a"), result("b"), say("user", "so?")];
        assert_eq!(render(single, &messages, &[]), r#"[hi]see(a{"x": 1})[r](b{"x": 1})[r][so?]"#);
    }

    #[test]
    fn a_result_follows_one_call_even_if_many_have_its_id() {
        let mut message = called("a");
        let call = message.extra["tool_calls"][0].clone();
        message.extra["tool_calls"] = Value::Array(vec![call; 500]);
        let messages: Vec<Message> = std::iter::once(message).chain((0..500).map(|_| result("a"))).collect();
        assert_eq!(super::one_call_each(&messages).len(), 1_000);
    }

    #[test]
    fn late_instructions_are_the_user_s_where_the_template_has_them_only_at_the_start() {
        let early = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}\
            {% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";
        let messages =
            [say("system", "a"), say("user", "hi"), say("system", "b"), say("user", "and"), say("assistant", "c")];
        assert_eq!(render(early, &messages, &[]), "[system]a[user]hi\n\nb\n\nand[assistant]c");
        assert_eq!(render(PLAIN, &messages, &[]), "[system]a[user]hi[system]b[user]and[assistant]c");
    }

    #[test]
    fn messages_of_one_role_are_one_turn_where_turns_must_alternate() {
        let strict = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}\
            [{{ m.role }}]{{ m.content }}{% endfor %}";
        let messages =
            [say("user", "a"), say("user", "b"), say("assistant", "c"), say("assistant", "d"), say("user", "e")];
        assert_eq!(render(strict, &messages, &[]), "[user]a\n\nb[assistant]c\n\nd[user]e");
        assert_eq!(render(PLAIN, &messages, &[]), "[user]a[user]b[assistant]c[assistant]d[user]e");
        // The results of tools are the user's there.
        let called = [say("user", "hi"), called("a"), result("a"), say("user", "so?")];
        assert!(render(strict, &called, &[]).ends_with("[user]<tool_response>\nr\n</tool_response>\n\nso?"));
    }

    /// If each of them copied those before it, this would copy gigabytes.
    #[test]
    fn thousands_of_late_instructions_are_merged_in_one_pass() {
        let mut messages = vec![say("user", "hi")];
        messages.extend((0..8_000).map(|_| say("system", &"s".repeat(1_000))));
        let merged = super::merge_late_instructions(messages);
        assert_eq!(merged.len(), 1);
        assert_eq!(merged[0].text().len(), 2 + 8_000 * 1_002);
    }

    #[test]
    fn developers_speak_as_the_system_unless_the_template_knows_them() {
        assert_eq!(render(PLAIN, &[say("developer", "d"), say("user", "hi")], &[]), "[system]d[user]hi");
        let knowing = format!("{{# developer #}}{PLAIN}");
        assert_eq!(render(&knowing, &[say("developer", "d"), say("user", "hi")], &[]), "[developer]d[user]hi");
        let early = format!(
            "{{% if 'system' in messages[1:] | map(attribute='role') %}}{{{{ raise_exception('late') }}}}{{% endif %}}{knowing}"
        );
        let both = [say("system", "s"), say("developer", "d"), say("user", "hi")];
        assert_eq!(render(&early, &both, &[]), "[system]s[developer]d[user]hi");
        // A developer's second message would be lost.
        let first_only = "{{ '[' ~ messages[0].role ~ ']' ~ messages[0].content if messages[0].role in ['system', 'developer'] }}\
            {% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(render(first_only, &both, &[]), "[system]s\n\nd[user]hi");
        assert_eq!(render(first_only, &[say("user", "hi"), say("developer", "d")], &[]), "[user]hi\n\nd");
    }

    #[test]
    fn instructions_are_one_message_or_part_of_the_first_turn() {
        let messages = [say("system", "a"), say("developer", "b"), say("user", "hi"), say("assistant", "c")];
        assert_eq!(render(PLAIN, &messages, &[]), "[system]a\n\nb[user]hi[assistant]c");
        assert_eq!(render(NO_SYSTEM, &messages, &[]), "[user]a\n\nb\n\nhi[assistant]c");
        assert_eq!(render(NO_SYSTEM, &messages[..1], &[]), "[user]a");
    }

    #[test]
    fn the_last_message_can_be_continued() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let template = ChatTemplate::new(source, "", "").unwrap();
        let options =
            RenderOptions { add_generation_prompt: true, continue_final_message: true, ..RenderOptions::default() };
        let messages = [say("user", "hi"), say("assistant", "It is ")];
        assert_eq!(template.render(&messages, &options).unwrap(), "<user>hi</s><assistant>It is ");
        assert!(template.render(&messages[..1], &options).is_err());
        assert!(template.render(&[], &options).is_err());
    }
}
