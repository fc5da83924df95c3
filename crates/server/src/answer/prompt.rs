//! From an [`Ask`] to requests for the engine: the template is rendered, the text encoded, the grammar compiled.

use std::sync::Arc;

use engine::{Constraint, Request, RequestKind, TenantId, fresh_seed};
use serde_json::Value;
use text::{Grammar, RenderOptions, ReplyParser, SpecialTokens, StopStrings, TemplateError, Tool, ToolChoice};
use types::TokenId;

use super::ask::{Ask, CHOICES_MAX, Chat, Input, Prompt, Turn};
use super::choice::Choice;
use super::constraint::Grammatical;
use crate::error::ApiError;
use crate::served::Served;

/// A request for each choice, prompt after prompt.
pub(super) fn prepare(served: &Served, ask: Ask, tenant: TenantId) -> Result<Vec<(Request, Choice)>, ApiError> {
    let script = Script::new(served, ask.input, ask.grammar)?;
    if ask.choices == 0 || script.prompts.len().saturating_mul(ask.choices) > CHOICES_MAX {
        return Err(ApiError::invalid("n", format!("there must be 1 to {CHOICES_MAX} choices")));
    }
    let stops = StopStrings::new(ask.stop);
    let stops = stops.map_err(|error| ApiError::invalid("stop", error.to_string()))?;
    let own_ends: &[TokenId] = if ask.ignore_eos { &[] } else { served.tokenizer.eos_ids() };
    let eos: Arc<[TokenId]> = own_ends.iter().chain(&ask.stop_tokens).copied().collect();
    let seed = ask.wishes.seed.unwrap_or_else(fresh_seed);
    let special = if ask.show_special { SpecialTokens::Show } else { SpecialTokens::Hide };
    let mut prepared = Vec::with_capacity(script.prompts.len() * ask.choices);
    for prompt in &script.prompts {
        for index in 0..ask.choices {
            let detokenizer = served.tokenizer.detokenizer(special);
            let mut choice = match &script.reply {
                // As OpenAI's completions have it: whoever asks for one token gets the probability of one, also of an end.
                None => Choice::new(detokenizer, stops.clone(), None).with_end_token(true),
                Some(reply) => {
                    let parser = ReplyParser::new(&served.format, Arc::clone(&reply.tools)).after_prompt(&reply.prompt);
                    Choice::new(detokenizer.showing(served.markers.clone()), stops.clone(), Some(parser))
                        .with_reasoning(served.format.opens_reasoning(&reply.prompt))
                        .with_one_call_only(reply.one_call_only)
                }
            };
            if ask.logprobs.is_some() {
                choice = choice.with_tokens();
            }
            if ask.prompt_logprobs.is_some() {
                choice = choice.with_prompt(prompt.clone());
            }
            let request = Request {
                prompt: prompt.clone(),
                sampling: ask.wishes.params(&served.defaults, ask.logprobs, seed.wrapping_add(index as u64)),
                tokens_max: ask.tokens_max.unwrap_or(usize::MAX),
                tokens_min: ask.tokens_min,
                eos: Arc::clone(&eos),
                tenant,
                constraint: script.constraint(served)?,
                prompt_logprobs: ask.prompt_logprobs,
                kind: RequestKind::Generate,
            };
            prepared.push((request, choice));
        }
    }
    Ok(prepared)
}

/// What the model reads, and how its answer is to be written and read.
struct Script {
    prompts: Vec<Vec<TokenId>>,
    grammar: Option<Grammar>,
    /// None: all of the answer is text.
    reply: Option<ReplyTo>,
}

/// What a reply answers.
struct ReplyTo {
    prompt: String,
    tools: Arc<[Tool]>,
    one_call_only: bool,
}

impl Script {
    fn new(served: &Served, input: Input, grammar: Option<Grammar>) -> Result<Self, ApiError> {
        let chat = match input {
            Input::Chat(chat) => chat,
            Input::Prompts(prompts) => {
                let encode = |prompt| encode(served, prompt, "prompt");
                let prompts = prompts.into_iter().map(encode).collect::<Result<_, _>>()?;
                return Ok(Self { prompts, grammar, reply: None });
            }
        };
        let (prompt, tokens) = conversation(served, &chat)?;
        let tools: Arc<[Tool]> = if chat.tool_choice == ToolChoice::None { Arc::new([]) } else { tools(&chat.tools) };
        let calls = served.format.tool_grammar(&served.tokenizer, &tools, &chat.tool_choice, !chat.one_call_only);
        let calls = calls.map_err(|error| ApiError::invalid("tools", chain(&error)))?;
        // A call that must be made comes before a form that the answer must have.
        let grammar = calls.or(grammar).map(|grammar| served.format.reasoned(grammar, &prompt));
        Ok(Self {
            prompts: vec![tokens],
            grammar,
            reply: Some(ReplyTo { prompt, tools, one_call_only: chat.one_call_only }),
        })
    }

    fn constraint(&self, served: &Served) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let Some(grammar) = &self.grammar else { return Ok(None) };
        let matcher = served.grammars.compile(grammar);
        let matcher = matcher.map_err(|error| ApiError::invalid("response_format", chain(&error)))?;
        Ok(Some(Box::new(Grammatical(matcher))))
    }
}

fn tools(tools: &[Value]) -> Arc<[Tool]> {
    let tool = |tool: &Value| {
        let function = &tool["function"];
        Tool {
            name: function["name"].as_str().unwrap_or_default().to_owned(),
            parameters: function.get("parameters").cloned(),
            strict: function["strict"].as_bool().unwrap_or(false),
        }
    };
    tools.iter().map(tool).collect()
}

/// An error with its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// The tokens of a conversation, up to where the model answers.
pub async fn chat_tokens(served: Arc<Served>, chat: Chat) -> Result<Vec<TokenId>, ApiError> {
    elsewhere(move || conversation(&served, &chat).map(|(_, tokens)| tokens)).await
}

/// The tokens of a text; `add_special` puts those around it that the model expects.
pub async fn text_tokens(served: Arc<Served>, text: String, add_special: bool) -> Result<Vec<TokenId>, ApiError> {
    elsewhere(move || {
        let tokens = served.tokenizer.encode(&text, add_special);
        tokens.map_err(|error| ApiError::invalid("prompt", error.to_string()))
    })
    .await
}

/// Templates, tokenizers and grammars take their time: they run on a thread that nobody else waits for.
pub(super) async fn elsewhere<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal("the prompt could not be prepared"))?
}

/// A conversation as text and as tokens, up to where the model answers.
fn conversation(served: &Served, chat: &Chat) -> Result<(String, Vec<TokenId>), ApiError> {
    let Some(template) = &served.template else {
        let message = "this model has no chat template: it continues texts, at /v1/completions";
        return Err(ApiError::invalid("messages", message).code("no_chat_template"));
    };
    let tools = if chat.tool_choice == ToolChoice::None { Vec::new() } else { chat.tools.clone() };
    let options = RenderOptions {
        add_generation_prompt: chat.turn == Turn::New,
        continue_final_message: chat.turn == Turn::Continued,
        tools,
        extra: chat.template_args.clone(),
        now: None,
    };
    let text = template.render(&chat.messages, &options).map_err(|error| match error {
        TemplateError::Refused(_) | TemplateError::Failed(_) => ApiError::invalid("messages", error.to_string()),
        _ => ApiError::internal(error.to_string()),
    })?;
    let tokens = served.tokenizer.encode(&text, false);
    let tokens = tokens.map_err(|error| ApiError::invalid("messages", error.to_string()))?;
    Ok((text, tokens))
}

/// The tokens of a prompt that is taken as it is.
pub(super) fn encode(served: &Served, prompt: Prompt, param: &str) -> Result<Vec<TokenId>, ApiError> {
    match prompt {
        Prompt::Tokens(tokens) => Ok(tokens),
        Prompt::Text(text) => {
            served.tokenizer.encode(&text, true).map_err(|error| ApiError::invalid(param, error.to_string()))
        }
    }
}
