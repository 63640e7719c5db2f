//! The agent's loop.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::client::{Client, ClientError, Message};
use super::tests_run::TestCommand;
use super::tools::{Answer, Tools};

/// What an agent is started with.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    pub workspace: PathBuf,
    /// What is to be done.
    pub statement: String,
    pub model: String,
    /// Model calls at most.
    pub max_turns: u32,
    /// `max_tokens` of each call; `None` leaves it out.
    pub max_tokens: Option<u32>,
    pub tests: TestCommand,
}

/// An agent that could not go on.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Model(#[from] ClientError),
    #[error("workspace {}: {cause}", path.display())]
    Workspace { path: PathBuf, cause: std::io::Error },
}

/// Why an agent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    Submitted,
    MaxTurns,
}

/// How an agent's work went.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    pub ended: Ended,
    /// Model calls made.
    pub turns: u32,
}

/// A conversation about one workspace.
#[derive(Debug)]
pub struct Agent {
    options: AgentOptions,
    client: Client,
    tools: Tools,
    messages: Vec<Value>,
}

impl Agent {
    /// Reads the workspace and makes the first message.
    ///
    /// # Errors
    /// [`AgentError::Workspace`] when it cannot be read.
    pub fn new(options: AgentOptions, client: Client) -> Result<Self, AgentError> {
        let (tools, first) = Tools::new(&options.workspace, &options.statement, options.tests.clone())
            .map_err(|cause| AgentError::Workspace { path: options.workspace.clone(), cause })?;
        let messages = vec![json!({"role": "user", "content": first})];
        Ok(Self { options, client, tools, messages })
    }

    /// Works until the model submits or the turns are used up.
    ///
    /// # Errors
    /// [`AgentError`] when the model cannot be asked or the workspace fails.
    pub async fn run(&mut self) -> Result<Report, AgentError> {
        for turn in 1..=self.options.max_turns {
            let message = self.client.complete(&self.request()).await?;
            self.messages.push(message.to_history());
            if self.answer(&message).await? {
                return Ok(Report { ended: Ended::Submitted, turns: turn });
            }
        }
        Ok(Report { ended: Ended::MaxTurns, turns: self.options.max_turns })
    }

    /// The conversation so far.
    #[must_use]
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    fn request(&self) -> Value {
        let mut request = json!({
            "model": self.options.model,
            "messages": self.messages,
            "tools": Tools::definitions(),
        });
        if let Some(max_tokens) = self.options.max_tokens {
            request["max_tokens"] = max_tokens.into();
        }
        request
    }

    /// Answers every tool call of a message, in order; true once the model has submitted.
    async fn answer(&mut self, message: &Message) -> Result<bool, AgentError> {
        let calls = message.tool_calls.as_deref().unwrap_or_default();
        for call in calls {
            let answer = self.tools.call(&call.function.name, &call.function.arguments);
            let answer = answer
                .await
                .map_err(|cause| AgentError::Workspace { path: self.options.workspace.clone(), cause })?;
            let Answer::Text(text) = answer else {
                return Ok(true);
            };
            self.messages.push(json!({"role": "tool", "tool_call_id": call.id, "content": text}));
        }
        if calls.is_empty() {
            self.messages.push(json!({"role": "user", "content": Tools::no_call()}));
        }
        Ok(false)
    }
}
