// Sends requests to a server with Vercel's AI SDK, over each API of its providers, and prints the responses as one JSON
// document. test_client_libraries.py runs it in a folder that has the SDK:  node ai_sdk.mjs ADDRESS

import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from 'ai'

const baseURL = process.argv[2] + '/v1'
const compatible = createOpenAICompatible({ name: 'penstock', baseURL, includeUsage: true, supportsStructuredOutputs: true })
const openai = createOpenAI({ baseURL, apiKey: 'none' })
const anthropic = createAnthropic({ baseURL, apiKey: 'none' })
const providers = { compatible, responses: openai, chat: openai.chat, messages: anthropic }

const object = (properties) => jsonSchema({ type: 'object', properties, required: Object.keys(properties), additionalProperties: false })
const tools = {
  get_weather: tool({
    description: 'Get the weather of a city',
    inputSchema: object({ city: { type: 'string' } }),
    execute: async () => ({ temperature: 21 }),
  }),
}
const question = 'What is the capital of Canada?', weather = 'What is the weather in Paris?'

async function ask(provider) {
  const options = { model: provider('default'), temperature: 0, maxRetries: 0, maxOutputTokens: 60 }
  const whole = await generateText({ ...options, prompt: question })
  const stream = streamText({ ...options, prompt: question })
  const pieces = []
  for await (const piece of stream.textStream) pieces.push(piece)
  const agent = streamText({ ...options, tools, prompt: weather, stopWhen: stepCountIs(3) })
  const agentText = await agent.text, steps = await agent.steps
  const forced = await generateText({ ...options, tools, toolChoice: 'required', prompt: question })
  const output = Output.object({ schema: object({ n: { type: 'integer', minimum: 0, maximum: 9 } }) })
  const unknown = await generateText({ ...options, model: provider('unknown'), prompt: question }).catch((error) => error)
  return {
    answer: whole.text,
    finish: [whole.finishReason, await stream.finishReason],
    usage: [whole.usage, await stream.usage].map((usage) => [usage.inputTokens, usage.outputTokens]),
    pieces,
    agent: agentText,
    calls: steps.map((step) => step.toolCalls.map((call) => [call.toolName, call.input])),
    forced: forced.toolCalls.map((call) => call.toolName),
    object: (await generateText({ ...options, output, prompt: question })).output,
    unknown: [unknown.statusCode, unknown.message],
  }
}

const said = {}
for (const [name, provider] of Object.entries(providers)) said[name] = await ask(provider)
const vectors = await embedMany({ model: compatible.textEmbeddingModel('default'), values: ['one', 'two'] })
console.log(JSON.stringify({ said, dimensions: vectors.embeddings.map((vector) => vector.length) }))
