//! The serving routes: vLLM's shapes, key for key, over a model that knows three replies by heart.

mod chat;
mod other;
mod parsing;
mod support;
